# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions, with its names, arguments and layouts, computed by fulmen.

    from fulmen.compat.flash_attn import flash_attn_func, flash_attn_varlen_func     FA2
    from fulmen.compat import flash_attn_3                                           FA3
    fulmen.compat.flash_attn.install()       packages that `import flash_attn` find these functions

Arrays are (batch, row, head, dim), packed (row, head, dim); causal and window are aligned
bottom-right; window_size counts keys to the left and right, -1 without limit; causal with a right
window means none. Any head dimension to 576 (values 512), float32 and float64 too, on the CPU too.
What differs, and why, is the table of docs: Migration. Refused by name: paged caches and rotary
embedding inside flash_attn_with_kvcache, FP8 descales.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Callable

import torch
from torch import Tensor

from .. import attention, attention_varlen
from ..errors import ArgumentError, UnsupportedError
from . import bert_padding as bert_padding
from .dropped import draw, dropped_probabilities
from .finder import install as _install
from .finder import uninstall as _uninstall
from .flash_shared import bound, check_offsets, options_of

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

__version__ = "2.8.3"  # the FlashAttention whose calls these are

Window = tuple[int, int]


def _call(
    attend: Any, q: Tensor, k: Tensor, rest: tuple[Any, ...], with_probs: bool, options: Any
) -> Any:
    """o of attend(q, k, *rest, **options); with_probs: (o, lse, S_dmask), None without dropout."""
    if not with_probs:
        return attend(q, k, *rest, **options)
    if options["dropout_p"] > 0:
        options["rng"] = draw(q)
    o, lse = attend(q, k, *rest, return_lse=True, **options)
    if options["dropout_p"] == 0:
        return o, lse, None
    with torch.no_grad():
        packed = dict(zip(("cu_q", "cu_kv"), rest[1:]))
        return o, lse, dropped_probabilities(q, k, {**options, **packed})


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FA2's flash_attn_func: q (batch, q_row, head, dim), k and v (batch, kv_row, kv_head, dim).

    Returns:
        o like q; with return_attn_probs (o, lse, S_dmask): lse (batch, head, q_row), S_dmask None
        without dropout, else (batch, head, q_row, kv_row) probabilities up to a factor, negative
        where they were dropped: the one result here of quadratic size, for tests.
    """
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    return _call(attention, q, k, (v,), return_attn_probs, {"layout": "bshd", **options})


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """FA2's flash_attn_varlen_func: q (total_q, head, dim), k and v (total_k, kv_head, dim).

    max_seqlen_q and max_seqlen_k may be left out, or be tensors; lse is (head, total_q), S_dmask
    (sequence, head, longest q, longest kv).
    """
    check_offsets(cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        raise UnsupportedError(
            "block_table asks for a paged cache, which comes later; gather the pages into k and v"
        )
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    options.update(max_q=bound(max_seqlen_q), max_kv=bound(max_seqlen_k))
    rest = v, cu_seqlens_q, cu_seqlens_k
    return _call(attention_varlen, q, k, rest, return_attn_probs, options)


def _packed_form(
    base: Callable[..., Any],
    name: str,
    leading: Sequence[Parameter],
    without: Sequence[str],
    unpacked: Callable[[dict[str, Any]], dict[str, Any]],
    shape: str,
) -> Callable[..., Any]:
    """A function of FA2 that takes several tensors as one.

    Args:
        base: the function that it calls.
        name: what it is called.
        leading: its first parameters; those of base follow.
        without: parameters of base that it does not have.
        unpacked: from its arguments by name to those of base.
        shape: what the tensor is, for the documentation.
    """
    own = [*leading, *(p for x, p in signature(base).parameters.items() if x not in without)]
    names = [p.name for p in own]

    def form(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > len(names):
            raise TypeError(f"{name}() takes {len(names)} arguments; {len(arguments)} were given")
        return base(**unpacked({**dict(zip(names, arguments)), **keywords}))

    form.__name__ = form.__qualname__ = name
    form.__doc__ = f"FA2's {name}: {shape}."
    form.__signature__ = Signature(own)  # type: ignore[attr-defined]
    return form


def _qkv(given: dict[str, Any]) -> dict[str, Any]:
    q, k, v = given.pop("qkv").unbind(-3)
    return {**given, "q": q, "k": k, "v": v}


def _kv(given: dict[str, Any]) -> dict[str, Any]:
    k, v = given.pop("kv").unbind(-3)
    return {**given, "k": k, "v": v}


def _varlen_qkv(given: dict[str, Any]) -> dict[str, Any]:
    offsets, longest = given.pop("cu_seqlens"), given.pop("max_seqlen", None)
    for side in "qk":
        given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"] = offsets, longest
    return _qkv(given)


_Q, _KV, _QKV, _OFFSETS = (
    Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("q", "kv", "qkv", "cu_seqlens")
)
_LONGEST = Parameter("max_seqlen", Parameter.POSITIONAL_OR_KEYWORD, default=None)
_OF_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table")

flash_attn_qkvpacked_func = _packed_form(
    flash_attn_func, "flash_attn_qkvpacked_func", (_QKV,), "qkv", _qkv,
    "qkv (batch, row, 3, head, dim)",
)  # fmt: skip
flash_attn_kvpacked_func = _packed_form(
    flash_attn_func, "flash_attn_kvpacked_func", (_Q, _KV), "qkv", _kv,
    "kv (batch, row, 2, head, dim)",
)  # fmt: skip
flash_attn_varlen_qkvpacked_func = _packed_form(
    flash_attn_varlen_func, "flash_attn_varlen_qkvpacked_func", (_QKV, _OFFSETS, _LONGEST),
    (*"qkv", *_OF_VARLEN), _varlen_qkv, "qkv (total, 3, head, dim)",
)  # fmt: skip
flash_attn_varlen_kvpacked_func = _packed_form(
    flash_attn_varlen_func, "flash_attn_varlen_kvpacked_func", (_Q, _KV),
    (*"qkv", "block_table"), _kv, "kv (total_k, 2, kv_head, dim)",
)  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """FA2's flash_attn_with_kvcache on contiguous caches (batch, row, kv_head, dim); no gradients.

    k and v, where given, are written into the caches at cache_seqlens first, in place. num_splits
    chooses nothing here: results do not depend on it.

    Raises:
        fulmen.UnsupportedError: pages (block_table), rotary embedding, left padding.
    """
    del rotary_interleaved, num_splits
    _refuse_what_comes_later(
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
    )
    lengths = cache_seqlens
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        if k is not None:
            _append(k_cache, v_cache, k, v, lengths, cache_batch_idx)
            lengths = lengths + k.shape[1]
        if cache_batch_idx is not None:
            k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        options = options_of(
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return attention(
            q,
            k_cache,
            v_cache,
            layout="bshd",
            kv_lengths=None if lengths is None else lengths.clamp(max=k_cache.shape[1]),
            return_lse=return_softmax_lse,
            **options,
        )


_ADVICE = {
    "block_table": "gather the pages into contiguous caches",
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
    "cache_leftpad": "pass a boolean mask to fulmen.attention",
}


def _refuse_what_comes_later(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} of flash_attn_with_kvcache comes later; until then {_ADVICE[name]}"
            )


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Any, lengths: Any, entries: Any
) -> None:
    """Writes new keys and values behind those that are there; beyond the end nothing is written."""
    if lengths is None:
        raise ArgumentError("k is given without cache_seqlens, which says where it goes")
    if v is None:
        raise ArgumentError("k is given without v")
    batch, new = k.shape[:2]
    rows = lengths.long()[:, None] + torch.arange(new, device=k.device)
    slots = torch.arange(batch, device=k.device) if entries is None else entries.long()
    slots = slots[:, None].expand(batch, new)
    fits = rows < k_cache.shape[1]
    for cache, fresh in ((k_cache, k), (v_cache, v)):
        cache[slots[fits], rows[fits]] = fresh[fits].to(cache.dtype)


def install(*, version: str = __version__, override: bool = False) -> None:
    """From now on `import flash_attn` (and flash_attn_interface, FA3) finds fulmen's functions.

    Package metadata says so too, so that libraries that look for a version find this one; many
    remember the answer, so call it before they are imported. Nothing is written to disk.

    Args:
        version: what flash_attn.__version__ and its metadata say.
        override: replace a flash_attn that is really installed, for this process.

    Raises:
        fulmen.ArgumentError: flash_attn is installed and override is False.

    >>> import fulmen.compat.flash_attn as shim
    >>> shim.install()
    >>> from flash_attn import flash_attn_func
    >>> shim.uninstall()
    """
    _install(version, override)


def uninstall() -> None:
    """Undoes `install`; modules that hold the functions keep them."""
    _uninstall()
