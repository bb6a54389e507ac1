# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3's functions (module flash_attn_interface), with its arguments and returns.

As fulmen.compat.flash_attn has FlashAttention 2's. FA3 has no dropout and no ALiBi; the functions
return o, or (o, lse) with return_attn_probs. k and v may have 8 bits, with k_descale and v_descale,
beside q of 16 bits, or of the same 8 with q_descale. Refused by name: qv. sm_margin, pack_gqa,
num_splits and scheduler_metadata choose nothing here: results do not depend on them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import attention, attention_varlen, masks
from ..errors import UnsupportedError
from .flash_cache import Cache, New, lengths_of, rotary_of, with_cache
from .flash_shared import bound, check_offsets, flash_attn_combine, options_of, scales_of

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(f"{name} is given; fulmen.compat.flash_attn_3 takes None there")


def _chunked(options: dict[str, Any], attention_chunk: int) -> dict[str, Any]:
    if attention_chunk:
        options["mask"] = masks.chunks(attention_chunk)
    return options


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's flash_attn_func: o, or (o, lse) with return_attn_probs."""
    del num_splits, pack_gqa, sm_margin
    _refuse(qv=qv)
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
        **scales_of(
            True, q.shape[-2], q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        ),
    )
    return attention(
        q, k, v, layout="bshd", return_lse=return_attn_probs, **_chunked(options, attention_chunk)
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's flash_attn_qkvpacked_func: (batch, row, 3, head, dim), or with num_heads_q
    (batch, row, num_heads_q + 2 * kv_heads, dim)."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        heads = qkv.shape[2] // 3 if num_heads_q is None else num_heads_q
        kv_heads = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=-2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's flash_attn_varlen_func: o, or (o, lse) with return_attn_probs, lse (head, total_q)."""
    check_offsets(cu_seqlens_q, cu_seqlens_k)
    del num_splits, pack_gqa, sm_margin
    _refuse(qv=qv)
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
        **scales_of(
            False, q.shape[-2], q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        ),
    )
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q=bound(max_seqlen_q),
        max_kv=bound(max_seqlen_k),
        q_lengths=seqused_q,
        kv_lengths=seqused_k,
        return_lse=return_attn_probs,
        **_chunked(options, attention_chunk),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """FA3's flash_attn_with_kvcache: caches (batch, row, kv_head, dim), or pages; no gradients.

    As FA2's; and packed queries (cu_seqlens_q) and new keys (cu_seqlens_k_new), chunks, and
    rotary_seqlens, where the first new key of each request stands.
    """
    del scheduler_metadata, pack_gqa, sm_margin, num_splits
    _refuse(qv=qv)
    options = options_of(
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_softmax_lse,
    )
    is_whole = page_table is None and cache_batch_idx is None and cu_seqlens_q is None
    options.update(
        scales_of(
            is_whole, q.shape[-2], q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )
    )
    options["max_q"] = None if cu_seqlens_q is None else bound(max_seqlen_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lengths = lengths_of(cache_seqlens, batch, q.device)
    if page_table is not None and cache_batch_idx is not None:  # which row of the table each has
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    cache = Cache(k_cache, v_cache, lengths, page_table, cache_batch_idx, cache_leftpad)
    new = None if k is None else New(k, v, cu_seqlens_k_new)
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    return with_cache(q, cache, new, rotary, cu_seqlens_q, _chunked(options, attention_chunk))


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Nothing to schedule ahead of a call: None, which the calls take."""
    return None
