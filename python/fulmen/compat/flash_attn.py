# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions, with its names, arguments and layouts, computed by fulmen.

    from fulmen.compat.flash_attn import flash_attn_func, flash_attn_varlen_func     FA2
    from fulmen.compat import flash_attn_3                                           FA3
    fulmen.compat.flash_attn.install()       packages that `import flash_attn` find these functions

Arrays are (batch, row, head, dim), packed (row, head, dim); causal and window are aligned
bottom-right; window_size counts keys to the left and right, -1 without limit; causal with a right
window means none. Any head dimension to 576 (values 512), float32 and float64 too, on the CPU too.
Caches in pages of any size. What differs, and why, is the table of docs: Migration.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Callable

import torch
from torch import Tensor

from .. import attention, attention_paged, attention_varlen
from ..errors import UnsupportedError
from . import bert_padding as bert_padding
from .dropped import draw, dropped_probabilities
from .finder import install as _install
from .finder import uninstall as _uninstall
from .flash_cache import Cache, New, lengths_of, rotary_of, with_cache
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
    (sequence, head, longest q, longest kv). With block_table (batch, page) k and v are pages (page,
    row, kv_head, dim), of any number of rows; then there is no gradient and no dropout.
    """
    check_offsets(cu_seqlens_q, cu_seqlens_k)
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
    if block_table is not None:
        return _paged(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, return_attn_probs, options)
    rest = v, cu_seqlens_q, cu_seqlens_k
    return _call(attention_varlen, q, k, rest, return_attn_probs, options)


def _paged(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, pages: Tensor, with_probs: bool,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Packed queries over pages; (o, lse, None) with_probs."""
    if options.pop("dropout_p") > 0:
        raise UnsupportedError("dropout_p is above 0 beside block_table; caches have no dropout")
    del options["deterministic"]  # there is no backward pass
    found = attention_paged(
        q, k, v, pages, cu_k.diff(), cu_q=cu_q, return_lse=with_probs, **options
    )
    return (*found, None) if with_probs else found


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
    """FA2's flash_attn_with_kvcache: caches (batch, row, kv_head, dim), or pages; no gradients.

    k and v, where given, are written into the caches at cache_seqlens first, in place, rotated if
    rotary_cos is given, by fulmen.append_kv: on the CPU new rows that do not fit are an error, and
    nothing is written; on a GPU these rows are not written. num_splits chooses nothing here:
    results do not depend on it. A page may have any number of rows.
    """
    del num_splits
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )
    lengths = lengths_of(cache_seqlens, q.shape[0], q.device)
    cache = Cache(k_cache, v_cache, lengths, block_table, cache_batch_idx, cache_leftpad)
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved)
    return with_cache(q, cache, None if k is None else New(k, v), rotary, None, options)


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
