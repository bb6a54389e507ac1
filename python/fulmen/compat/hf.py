# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen as an attention implementation of Hugging Face transformers.

    fulmen.compat.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulmen")

Two hooks. The mask hook (hf_masks.py) says what a model's mask is, as structure where it can. The
attention hook reads a mask of four axes as complete, and adds causal (bottom-right) and the layer's
window to all else. Every keyword that it receives is read, known to have no effect, or an error.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch

from .. import append_kv, attention, attention_paged, masks
from ..errors import ArgumentError, UnsupportedError
from .flash_shared import SAME_WORDS, WITHOUT_EFFECT, same_words
from .hf_masks import PackedDocuments, has_interface, interfaces, mask_hook

__all__ = ["WITHOUT_EFFECT", "PackedDocuments", "attention_hook", "mask_hook", "register"]


def register(name: str = "fulmen") -> None:
    """Makes `attn_implementation=name` known to transformers. May be called again.

    A model whose attention does not go through transformers' AttentionInterface (Bloom, Falcon, MPT
    and others: docs, PyTorch and Hugging Face) keeps its own code: it says so in one warning when
    it is asked for this name, and its config names what it uses instead.

    Args:
        name: how models ask for it. Continuous batching wants "flash" in it, and decodes from its
            pages on a GPU where a 2 or 3 follows: "fulmen_flash_3".

    Raises:
        fulmen.LibraryNotFound: transformers, 4.56 or later, is not installed.
    """
    attention_interface, mask_interface = interfaces()
    from transformers import PreTrainedModel

    attention_interface.register(name, attention_hook)
    mask_interface.register(name, mask_hook)
    _names.add(name)
    _watch(PreTrainedModel)
    if "flash" in name:
        _watch_flash()
        functions = attention_interface()
        if f"{_PAGED}flash_attention_2" in functions.valid_keys():
            attention_interface.register(_PAGED + name, functions[f"{_PAGED}flash_attention_2"])


# In front of the name in continuous batching where transformers (5.17, others before 5.24) has a
# function of its own for it, which moves keys and values and calls those of _watch_flash.
_PAGED = "paged|"

_names: set[str] = set()
_told: set[type] = set()


def _watch(models: Any) -> None:
    """Lets models without the attention interface say that they keep their own code."""
    original = models.get_correct_attn_implementation
    if getattr(original, "is_watched", False):
        return

    @functools.wraps(original)
    def chosen(self: Any, requested_attention: Any, *args: Any, **keywords: Any) -> Any:
        if requested_attention not in _names or has_interface(type(self)):
            return original(self, requested_attention, *args, **keywords)
        used = original(self, None, *args, **keywords)
        if type(self) not in _told:
            _told.add(type(self))
            warnings.warn(
                f"{type(self).__name__} has attention code of its own, without transformers' "
                f"AttentionInterface: fulmen is not called, attn_implementation is {used!r}",
                stacklevel=2,
            )
        return used

    chosen.is_watched = True  # type: ignore[attr-defined]
    models.get_correct_attn_implementation = chosen


def _watch_flash() -> None:
    """Gives transformers the functions that it looks for behind a name with "flash" in it."""
    from transformers import modeling_flash_attention_utils as utils

    from . import flash_attn
    from .bert_padding import pad_input, unpad_input

    original = utils._lazy_imports
    if getattr(original, "is_watched", False):
        return
    functions = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func,
                 flash_attn.flash_attn_with_kvcache, pad_input, unpad_input)  # fmt: skip

    @functools.wraps(original)
    def imports(implementation: Any, *args: Any, **keywords: Any) -> Any:
        if str(implementation).removeprefix(_PAGED) in _names:
            return functions
        return original(implementation, *args, **keywords)

    imports.is_watched = True  # type: ignore[attr-defined]
    utils._lazy_imports = imports


# What asks for another attention: why it is refused. As unknown keywords are, but in better words.
_REFUSED = {
    "indices": "keys chosen per row are not read yet; attn_implementation='eager' has them",
    "block_indices": "blocks chosen per row are not read yet; attn_implementation='eager' has them",
    "sinks": "one sink for each row is not read; s_aux, one for each head, is",
}


def attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedDocuments | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    seq_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **words: Any,
) -> tuple[torch.Tensor, None]:
    """What a model's attention layer calls: query (batch, head, q_row, dim), the key and value
    heads not repeated.

    Args:
        module: the layer; its is_causal is read where the argument is None.
        query, key, value: (batch, head, row, dim).
        attention_mask: of the mask hook; or a model's own: (batch, kv_row) of bool or of integers,
            0 hides a key, or (batch, head, q_row, kv_row), bool or added.
        dropout: probability in [0, 1].
        scaling: factor of the scores; None: 1 / sqrt(dim).
        is_causal: bottom-right; not beside a mask of four axes, which is complete.
        sliding_window: keys that a row sees, its own included.
        s_aux: (head,): sinks.
        position_bias: added to the scores; broadcasts to (batch, head, q_row, kv_row).
        output_attentions: refused.
        cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) integers, offsets of packed documents among
            the rows of all batch entries, one after the other: each is computed as if alone.
        max_length_q, max_length_k: no document is longer.
        seq_idx: (batch, row) integers: the document of each token.
        block_table: (request, page) integers: of continuous batching, where each request decodes
            one row. key and value, (1, kv_head, request, dim), are then new: they are written
            behind the keys that cu_seq_lens_k counts beside them, and seen with those.
        k_cache, v_cache: (page, row, kv_head, dim): the pools that block_table points into.
        deterministic: as in fulmen.attention.
        **words: softcap; those of WITHOUT_EFFECT; others must be None.

    Returns:
        (o, None), o (batch, q_row, head, dim) contiguous.

    Raises:
        fulmen.UnsupportedError: a keyword that fulmen does not read, the probabilities among them,
            which are never made.
        fulmen.ArgumentError: a mask, offsets or document numbers that do not fit.
    """
    _refuse_unread(words)
    if output_attentions:
        raise UnsupportedError(
            "output_attentions=True asks for the attention probabilities, which fulmen never "
            "makes; attn_implementation='eager' does"
        )
    options: dict[str, Any] = {
        "scale": scaling,
        "causal": bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        "bias": position_bias,
        "sinks": s_aux,
        "dropout_p": dropout,
        "deterministic": bool(deterministic),
        **same_words(words),
    }
    if not (block_table is None and k_cache is None and v_cache is None):
        pools = _Pools(block_table, k_cache, v_cache, cu_seq_lens_k, attention_mask)
        return _decoded(query, key, value, pools, sliding_window, options), None
    packed = _offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    mask: Any = attention_mask
    is_dense = isinstance(mask, torch.Tensor) and mask.dim() == 4
    parts: list[Any] = []
    if is_dense:
        dense = mask[:, :, :, : key.shape[-2]]
        options["causal"] = False
        if dense.dtype == torch.bool:
            parts.append(dense)
        else:
            options["bias"] = dense if position_bias is None else position_bias + dense
    elif sliding_window is not None:
        options["window"] = (sliding_window - 1, 0 if options["causal"] else sliding_window - 1)
    if seq_idx is not None:
        parts.append(_documents(seq_idx, query, key, "seq_idx"))
    if packed and not is_dense:
        if position_bias is not None:
            raise UnsupportedError(
                "position_bias is given with cu_seq_lens_q; a bias for packed documents is read "
                "as part of an attention_mask of four axes"
            )
        return _packed(query, key, value, mask, parts, {**packed, **options}), None
    if packed:
        parts.append(_numbered(packed, query, key))
    elif not is_dense and mask is not None:
        parts.append(_of_two_axes(mask, query, key))
    o = attention(query, key, value, mask=_one_each(parts), **options)
    return o.transpose(1, 2).contiguous(), None


class _Pools(NamedTuple):
    """What the attention hook is given of a paged cache; mask is None in continuous batching."""

    table: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    cu_kv: torch.Tensor | None  # (request + 1,), the new row of each included
    mask: Any


def _decoded(
    query: Any, key: Any, value: Any, pools: _Pools, window: int | None, options: dict[str, Any]
) -> Any:
    """One new row of each request, written into its pages: o of (1, request, head, dim)."""
    if pools.table is None or pools.k is None or pools.v is None or pools.cu_kv is None:
        raise ArgumentError(
            "a paged cache is block_table, k_cache, v_cache and cu_seq_lens_k together; one of "
            "them is missing"
        )
    if pools.mask is not None or options["bias"] is not None:
        raise UnsupportedError("a mask or a position_bias is not read beside block_table")
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[:, None] for x in (query, key, value))
    page_rows = pools.k.shape[1]
    present = pools.cu_kv.diff()[: len(q)] - 1  # -1: a request that only fills a graph
    page = pools.table.gather(1, (present.clamp(min=0) // page_rows).long()[:, None])[:, 0]
    slots = torch.where(present < 0, -1, page * page_rows + present % page_rows)
    append_kv(pools.k, pools.v, k, v, slots[:, None], layout="bshd")
    if window is not None:
        options["window"] = (window - 1, 0)
    o = attention_paged(q, pools.k, pools.v, pools.table, present + 1, layout="bshd", **options)
    return o.view(query.shape[0], query.shape[2], *o.shape[-2:])


def _refuse_unread(words: dict[str, Any]) -> None:
    """Refuses keywords that would be swallowed."""
    for name, x in words.items():
        if x is not None and name not in WITHOUT_EFFECT and name not in SAME_WORDS:
            why = _REFUSED.get(name, "fulmen.compat.hf does not know what it means for attention")
            raise UnsupportedError(
                f"{name} is given to the attention of fulmen and not read: {why}"
            )


def _offsets(cu_q: Any, cu_kv: Any, max_q: Any, max_kv: Any) -> dict[str, Any]:
    """The offsets of packed documents as fulmen.attention has them; empty where there are none."""
    if cu_q is None and cu_kv is None:
        return {}
    if cu_q is None or cu_kv is None:
        given, missing = ("q", "k") if cu_kv is None else ("k", "q")
        raise ArgumentError(
            f"cu_seq_lens_{given} is given without cu_seq_lens_{missing}; packed documents need "
            "both"
        )
    longest = {"max_q": max_q, "max_kv": max_kv}
    longest = {name: x for name, x in longest.items() if isinstance(x, int)}
    return {"cu_q": cu_q, "cu_kv": cu_kv, **longest}


def _packed(
    query: Any, key: Any, value: Any, mask: Any, parts: list[Any], options: dict[str, Any]
) -> Any:
    """Rows of all batch entries one after the other, cut into documents."""
    if mask is not None:
        part = _of_two_axes(mask, query, key)
        if isinstance(part, torch.Tensor):  # a number for all rows and for the keys that are seen
            shown = part.flatten(1).to(torch.int32)
            part = masks.documents(shown.new_ones((query.shape[0], query.shape[-2])), shown)
        parts = [*parts, part]
    flat = [masks.documents(x.q_ids.flatten(), x.kv_ids.flatten()) for x in parts]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    o = attention(q, k, v, layout="shd", mask=_one_each(flat), **options)
    return o.unflatten(0, (query.shape[0], query.shape[-2])).contiguous()


def _one_each(parts: list[Any]) -> Any:
    """What `mask=` takes: of document numbers one kind that says what all of them say."""
    found: Any = None
    others = []
    for part in parts:
        if not isinstance(part, masks.Documents):
            others.append(part)
        else:
            found = part if found is None else _both(found, part)
    return tuple(others if found is None else [*others, found]) or None


def _both(one: masks.Documents, other: masks.Documents) -> masks.Documents:
    """Numbers that are equal where both are equal."""
    least = torch.minimum(other.q_ids.min(), other.kv_ids.min())
    span = torch.maximum(other.q_ids.max(), other.kv_ids.max()) - least + 1
    return masks.documents(
        one.q_ids.long() * span + (other.q_ids - least),
        one.kv_ids.long() * span + (other.kv_ids - least),
    )


def _numbered(packed: dict[str, Any], query: torch.Tensor, key: torch.Tensor) -> Any:
    """The documents between offsets, for a call whose mask has a row for each row of q."""
    ids = []
    for x, offsets in ((query, packed["cu_q"]), (key, packed["cu_kv"])):
        batch, rows = x.shape[0], x.shape[-2]
        row = torch.arange(batch * rows, device=x.device, dtype=offsets.dtype)
        ids.append(torch.bucketize(row, offsets[1:], right=True).view(batch, rows))
    return masks.documents(*ids)


def _documents(ids: torch.Tensor, query: torch.Tensor, key: torch.Tensor, name: str) -> Any:
    """Document numbers of all keys, the last of which are the rows."""
    if ids.dim() != 2 or ids.shape[1] != key.shape[-2] or ids.dtype.is_floating_point:
        raise ArgumentError(
            f"{name} has shape {tuple(ids.shape)} and dtype {str(ids.dtype)[6:]}; integers "
            f"(batch, {key.shape[-2]}), one for each key, are expected"
        )
    ids = ids.expand(query.shape[0], -1)
    return masks.documents(ids[:, ids.shape[1] - query.shape[-2] :], ids)


def _of_two_axes(attention_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """A boolean padding mask of keys, or the numbers of packed documents."""
    if isinstance(attention_mask, PackedDocuments):
        return _documents(attention_mask.ids, query, key, "attention_mask")
    if attention_mask.dim() != 2:
        raise ArgumentError(
            f"attention_mask has {attention_mask.dim()} axes; 2 (batch, kv_row) and 4 (batch, "
            "head, q_row, kv_row) are read"
        )
    if attention_mask.dtype.is_floating_point:
        raise ArgumentError(
            f"attention_mask (batch, kv_row) has dtype {str(attention_mask.dtype)[6:]}, which may "
            "be added or count keys; bool or integers, 0 for a hidden key, are read"
        )
    attention_mask = attention_mask.to(torch.bool)
    if attention_mask.shape[1] < key.shape[-2]:  # a static cache: what lies beyond is not filled
        missing = key.shape[-2] - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, None, None, :]
