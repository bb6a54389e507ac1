# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of FlashAttention 2 and 3: one implementation under both names.

New keys are rotated and written behind those that are there, queries are rotated, then all is
attended to; lengths and tables stay on the device. Caches are (batch, row, kv_head, dim), or with a
table of pages (page, row, kv_head, dim).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import append_kv, attention, attention_paged
from ..errors import ArgumentError
from .flash_rotary import rotated, rows_of


class Cache(NamedTuple):
    """The caches of a call and what says where the keys of each request are."""

    k: Tensor  # (batch, row, kv_head, dim), or (page, row, kv_head, dim)
    v: Tensor
    lengths: Any  # (batch,) keys that are there before the call; None: as many as fit
    pages: Any = None  # (batch, page)
    entries: Any = None  # (batch,) of caches without pages
    start: Any = None  # (batch,) left padding

    @property
    def capacity(self) -> int:
        """The most keys of a request."""
        rows: int = self.k.shape[1]
        pages: int = 1 if self.pages is None else self.pages.shape[1]
        return rows * pages


class New(NamedTuple):
    """New keys and values: (batch, row, kv_head, dim), or packed (total, kv_head, dim)."""

    k: Tensor
    v: Tensor
    offsets: Any = None  # (batch + 1,) of packed rows


class Rotary(NamedTuple):
    """Tables of a rotary embedding, and where the first new key of each request stands."""

    cos: Tensor  # (position, rotary_dim / 2)
    sin: Tensor
    is_interleaved: bool
    starts: Any = None  # (batch,); None: the lengths


def rotary_of(cos: Any, sin: Any, is_interleaved: bool, starts: Any = None) -> Rotary | None:
    """None without cos."""
    if cos is None:
        return None
    if sin is None:
        raise ArgumentError("rotary_cos is given without rotary_sin")
    return Rotary(cos, sin, is_interleaved, starts)


def lengths_of(cache_seqlens: Any, batch: int, device: Any) -> Any:
    """(batch,) from one number for all, or as it is."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)


def append(
    cache: Cache, new: New, rotary: Rotary | None, scales: dict[str, Any] | None = None
) -> Tensor:
    """Writes new keys and values behind those that are there; the lengths afterwards."""
    if cache.lengths is None:
        raise ArgumentError("k is given without cache_seqlens, which says where it goes")
    if new.v is None:
        raise ArgumentError("k is given without v")
    turns: dict[str, Any] = {}
    if rotary is not None:
        turns = {"cos": rotary.cos, "sin": rotary.sin, "interleaved": rotary.is_interleaved}
        if rotary.starts is not None:
            request, number = rows_of(new.k, new.offsets)
            turns["positions"] = rotary.starts.long()[request] + number
    append_kv(
        cache.k, cache.v, new.k, new.v, (cache.pages, cache.lengths), cu_new=new.offsets,
        batch_index=cache.entries, layout="bshd" if new.offsets is None else "shd", **turns,
        **(scales or {}),
    )  # fmt: skip
    added = new.k.shape[1] if new.offsets is None else new.offsets.diff().to(cache.lengths.dtype)
    lengths: Tensor = cache.lengths + added
    return lengths


def rotated_queries(q: Tensor, cu_q: Any, cache: Cache, rotary: Rotary, is_ordered: bool) -> Tensor:
    """Queries at their places behind the keys; all at the first, where no mask orders them."""
    starts = cache.lengths if rotary.starts is None else rotary.starts
    request, number = rows_of(q, cu_q)
    position = starts.long()[request] + (number if is_ordered else 0)
    return rotated(q, rotary.cos, rotary.sin, position, rotary.is_interleaved)


def with_cache(
    q: Tensor,
    cache: Cache,
    new: New | None,
    rotary: Rotary | None,
    cu_q: Any,
    options: dict[str, Any],
) -> Any:
    """o, or (o, lse), of queries over caches, in which new keys are written first.

    Args:
        q: (batch, q_row, head, dim); with cu_q (total_q, head, dim).
        cache: its lengths are those before the call.
        new: what is appended.
        rotary: applied to q and to the new keys; needs `new`, as the original does.
        cu_q: (batch + 1,) of packed queries.
        options: of fulmen.attention.
    """
    if rotary is not None and new is None:
        raise ArgumentError("rotary_cos is given without k: FlashAttention rotates q beside new k")
    if cache.pages is not None and cache.entries is not None:
        raise ArgumentError(
            "cache_batch_idx is given beside a table of pages, which says itself where each "
            "request is: leave cache_batch_idx=None"
        )
    with torch.no_grad():
        if rotary is not None:
            left, right = options["window"]
            is_ordered = options["causal"] or left >= 0 or right >= 0
            q = rotated_queries(q, cu_q, cache, rotary, is_ordered)
        lengths = cache.lengths
        if new is not None:
            scales = {x: y for x, y in options.items() if x in ("k_scale", "v_scale")}
            lengths = append(cache, new, rotary, scales)
        return _attended(q, cache._replace(lengths=lengths), cu_q, options)


def _attended(q: Tensor, cache: Cache, cu_q: Any, options: dict[str, Any]) -> Any:
    k, v, lengths, pages, entries, start = cache
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    layout = "bshd" if cu_q is None else "shd"
    if pages is None and entries is None and cu_q is None:
        return attention(q, k, v, kv_lengths=lengths, kv_start=start, layout=layout, **options)
    if lengths is None:
        lengths = lengths_of(cache.capacity, batch, q.device)
    if pages is None and entries is None:
        entries = torch.arange(batch, device=q.device)
    return attention_paged(
        q,
        k,
        v,
        pages,
        lengths,
        batch_index=entries,
        kv_start=start,
        cu_q=cu_q,
        layout=layout,
        **options,
    )
