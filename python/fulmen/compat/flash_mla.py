# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's calls (module flash_mla), dense and sparse, with its arguments and returns.

Any number of heads and of new rows, pages of any size, any topk, caches of 16-bit numbers and of
records of 656 and 584 bytes. get_mla_metadata() has nothing to compute: lengths are read where the
call runs, and results do not depend on what it returns. A negative index, and one past the cache,
is a key that is hidden, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..functional import attention_forward
from ..latent import attention_mla

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """FlashMLA's tile_scheduler_metadata and num_splits, which nothing here needs."""
    return None, None


def _slots(indices: Tensor | None, cache: Tensor | None) -> Tensor | None:
    """Indices with -1 for all that name no row of a cache (page, row, kv_head, dim)."""
    if indices is None or cache is None:
        return indices
    num_slots = cache.shape[0] * cache.shape[1]
    return torch.where((indices >= 0) & (indices < num_slots), indices, -1)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's call: (o, lse).

    Args:
        q: (batch, q_row, head, dim).
        k_cache: (page, row, kv_head, dim): the pool of pages.
        block_table: (batch, page) int32; beside indices it is not read.
        cache_seqlens: (batch,) int32; beside indices it is not read.
        head_dim_v: of the values, the first numbers of the keys.
        tile_scheduler_metadata: not read.
        num_splits: not read.
        softmax_scale: None: dim**-0.5.
        causal: new row i sees keys up to its own; not beside indices.
        is_fp8_kvcache: caches are records, whose dtype is one of 8 bits.
        indices: (batch, q_row, topk) int32: slots, page * rows of a page + row.
        attn_sink: (head,): one more logit in each row's denominator.
        extra_k_cache: a second pool.
        extra_indices_in_kvcache: (batch, q_row, topk) slots there.
        topk_length: (batch,) int32: how many of the indices count.
        extra_topk_length: likewise of the second pool.

    Returns:
        o (batch, q_row, head, head_dim_v) and lse (batch, head, q_row), natural logarithms,
        without the sink.

    Raises:
        ArgumentError: is_fp8_kvcache is not what k_cache is.
        fulmen.Error: as `fulmen.attention_mla`.
    """
    del tile_scheduler_metadata, num_splits
    if is_fp8_kvcache != (k_cache.dtype.itemsize == 1):
        raise ArgumentError(
            f"is_fp8_kvcache is {is_fp8_kvcache} and k_cache is {k_cache.dtype}; records are of "
            "torch.float8_e4m3fn, int8 or uint8, with 656 or 584 bytes a row"
        )
    if indices is None:
        dense: dict[str, Any] = {"page_table": block_table, "kv_lengths": cache_seqlens}
    else:
        dense = {}
    found: tuple[Tensor, Tensor] = attention_mla(
        q, k_cache, **dense, dim_v=head_dim_v, scale=softmax_scale, causal=causal, sinks=attn_sink,
        indices=_slots(indices, k_cache), topk_lengths=topk_length, extra_kv=extra_k_cache,
        extra_indices=_slots(extra_indices_in_kvcache, extra_k_cache),
        extra_topk_lengths=extra_topk_length, layout="bshd", return_lse=True,
    )  # fmt: skip
    return found


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's prefill over chosen keys: (o, max_logits, lse).

    Args:
        q: (q_row, head, dim).
        kv: (kv_row, 1, dim).
        indices: (q_row, 1, topk) int32: rows of kv.
        sm_scale: factor of the scores.
        d_v: of the values, the first numbers of the keys.
        attn_sink: (head,): one more logit in each row's denominator.
        topk_length: (q_row,) int32: how many of the indices count.

    Returns:
        o (q_row, head, d_v), and (q_row, head) each the largest score and the natural logarithm of
        the sum of exponentials, both without the sink; -inf where a row sees no key.

    Raises:
        UnsupportedError: kv has more heads than one.
        fulmen.Error: as `fulmen.attention_mla`.
    """
    if kv.shape[1] != 1:
        raise UnsupportedError(
            f"kv has {kv.shape[1]} heads; lists of indices are of one: call for each head"
        )
    slots = _slots(indices[:, 0], kv[:, None])
    assert slots is not None
    lengths = slots[:, 0] * 0 + slots.shape[1] if topk_length is None else topk_length
    found = attention_forward(
        q[:, None], kv[:, None], kv[:, None, :, :d_v], page_table=slots, kv_lengths=lengths,
        slots=True, scale=sm_scale, sinks=attn_sink, layout="bshd",
    )  # fmt: skip
    return found.o[:, 0], found.stats[:, :, 0, 0], found.lse[:, :, 0]
