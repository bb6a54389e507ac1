# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a few query rows as plain differentiable operations of torch.

What has no kernel of its own is composed from it: forward mode, and the derivatives of the
gradients (derivatives.py). Blocks of rows follow one another, each with at most BLOCK_ELEMS scores
per tensor, so that memory is linear in the sequence; time is that of the naive method. No length is
read on the host. What masks mean is written in fulmen.masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from ..masks import hidden

BLOCK_ELEMS = 1 << 22


class Meaning(NamedTuple):
    """What the settings of a call say, to be read by name."""

    options: Any  # the fields of fulmen_problem
    layout: str
    is_top_left: bool
    out_dtype: Any


def accumulator(dtype: Any) -> Any:
    """The dtype of lse and stats."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Geometry(NamedTuple):
    """A block of rows against all keys. Axes (batch or 1, head or 1, row of the block, kv_row)."""

    batch: int
    rows: slice
    visible: Tensor
    distance: Tensor  # |i + shift - j|
    q_position: Tensor  # (row of the block) index in its own sequence
    kv_position: Tensor  # (kv_row) likewise
    q_sequence: Any  # packed: (row of the block) which sequence; else None


class _Side(NamedTuple):
    """Rows or keys, each broadcastable to (batch, head, row, kv_row)."""

    position: Tensor  # in its own sequence
    length: Tensor
    sequence: Any


def _tall(x: Tensor) -> Tensor:
    return x.reshape(*x.shape, 1)


def _packed_side(index: Tensor, offsets: Tensor) -> _Side:
    offsets = offsets.to(torch.int64)
    sequence = torch.bucketize(index, offsets[1:], right=True)
    inside = sequence < offsets.shape[0] - 1
    own = sequence.clamp(max=offsets.shape[0] - 2)
    length = torch.where(inside, offsets[own + 1] - offsets[own], 0)
    position = index - offsets[own]
    return _Side(position, length, torch.where(inside, sequence, -1))


def geometry_of(
    arrays: Any, meaning: Meaning, batch: int, num_q: int, num_kv: int, rows: slice
) -> Geometry:
    """The geometry of one block of rows."""
    device = arrays.q.device
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(num_kv, device=device)
    if arrays.cu_q is not None:
        q_side, kv_side = _packed_side(i, arrays.cu_q), _packed_side(j, arrays.cu_kv)
        kv_offsets = arrays.cu_kv.to(torch.int64)
        own = q_side.sequence.clamp(min=0)
        own_keys = kv_offsets[own + 1] - kv_offsets[own]
        q_position, kv_position = q_side.position, kv_side.position
        visible = (_tall(q_side.sequence) == kv_side.sequence) & _tall(q_side.sequence >= 0)
        shift = _tall(own_keys - q_side.length)
    else:
        q_position, kv_position = i, j
        q_len: Any = num_q if arrays.q_lengths is None else arrays.q_lengths.view(-1, 1, 1, 1)
        kv_len: Any = num_kv if arrays.kv_lengths is None else arrays.kv_lengths.view(-1, 1, 1, 1)
        visible = (_tall(i) < q_len) & (j < kv_len)
        shift = kv_len - q_len
    if meaning.is_top_left:
        shift = 0
    level = _tall(q_position) + shift  # the key that a row is level with
    for part in hidden(meaning.options, level, kv_position):
        visible = visible & ~part
    if arrays.q_ids is not None:
        q_ids = _tall(arrays.q_ids[..., rows])
        kv_ids = arrays.kv_ids if arrays.kv_ids is not None else arrays.q_ids
        same = q_ids == kv_ids.reshape(*kv_ids.shape[:-1], 1, kv_ids.shape[-1])
        visible = visible & (same.unsqueeze(1) if same.dim() == 3 else same)
    visible = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    where = Geometry(
        batch,
        rows,
        visible,
        (level - kv_position).abs(),
        q_position,
        kv_position,
        q_side.sequence if arrays.cu_q is not None else None,
    )
    if arrays.mask is not None:
        where = where._replace(visible=visible & block_of(arrays.mask, where))
    return where


def block_of(x: Tensor, where: Geometry) -> Tensor:
    """The part of a mask or bias that belongs to a block, with four axes."""
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    if where.q_sequence is None:
        return x[:, :, where.rows] if x.shape[-2] > 1 else x
    if x.shape[-2] > 1:  # packed: indexed by the positions in a sequence
        x = x[:, :, where.q_position.clamp(0, x.shape[-2] - 1)]
    if x.shape[-1] > 1:
        x = x[:, :, :, where.kv_position.clamp(0, x.shape[-1] - 1)]
    return x


# Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011) as the library
# has it: counter (kv_row / 8, q_row, batch * heads + head, offset), eight 16-bit numbers from each.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key each round: golden ratio, sqrt(3) - 1
ROUNDS = 10
WORD = 0xFFFFFFFF


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of x * factor, both below 2^32: in halves, int64 holds no 64-bit word."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & WORD


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox; words are int64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high2, low2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def drop_factors(dropout_p: float, rng: Tensor, where: Geometry, heads: int) -> Tensor:
    """What each probability is multiplied by: 0, or 1 over the share that is kept."""
    threshold = math.floor(dropout_p * 65536 + 0.5)
    seed, offset = rng[0], rng[1]
    i, j = where.q_position.view(1, 1, -1, 1), where.kv_position.view(1, 1, 1, -1)
    if where.q_sequence is None:
        batch = torch.arange(where.batch, device=rng.device).view(-1, 1, 1, 1)
    else:
        batch = where.q_sequence.view(1, 1, -1, 1)
    plane = batch * heads + torch.arange(heads, device=rng.device).view(1, -1, 1, 1)
    words = philox4x32(
        torch.broadcast_tensors(j // 8, i, plane, offset),
        (seed & WORD, (seed >> 32) & WORD),
    )
    lane = j % 8
    word = torch.where(lane // 2 == 0, words[0], words[1])
    word = torch.where(lane // 2 == 2, words[2], word)
    word = torch.where(lane // 2 == 3, words[3], word)
    number = (word >> (16 * (lane % 2))) & 0xFFFF
    if threshold == 65536:
        return torch.zeros_like(number)
    kept: Any = number >= threshold
    return kept * (65536 / (65536 - threshold))


class Leaves(NamedTuple):
    """What can be differentiated, axes (batch, head, row, dim); bias and sinks may be None."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any


def heads_first(x: Any, layout: str) -> Any:
    """A view of x with the axes (batch, head, row, dim)."""
    if x is None:
        return None
    if layout in ("bshd", "shd"):
        x = x.transpose(-3, -2)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def as_layout(x: Any, layout: str) -> Any:
    """The inverse of heads_first."""
    if x is None:
        return None
    for _ in range(4 - len(layout)):
        x = x.squeeze(0)
    return x.transpose(-3, -2) if layout in ("bshd", "shd") else x


def attention_rows(
    leaves: Leaves, q: Tensor, meaning: Meaning, arrays: Any, where: Geometry
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the rows of `where`, whose queries are q: the equations of the semantics.

    S = softcap(scale * (q K^T)) + bias - slopes * distance;  m = rowmax S;  e = exp(S - m)
    l = rowsum e;  o = (e / l_total * drop) V;  lse = m + log l
    """
    options = meaning.options
    dtype = accumulator(q.dtype)
    batch, heads, num_rows, dim = q.shape
    kv_heads = leaves.k.shape[1]
    seen = where.visible.any(-2).any(1)[:, None, :, None]  # (batch or 1, 1, kv_row, 1)
    K = leaves.k.to(dtype).masked_fill(~seen, 0.0)
    V = leaves.v.to(dtype).masked_fill(~seen, 0.0)
    scale = 1.0 / math.sqrt(max(dim, 1)) if math.isnan(options.scale) else options.scale
    grouped = q.to(dtype).reshape(batch, kv_heads, heads // kv_heads, num_rows, dim)
    S = scale * (grouped @ K.unsqueeze(2).transpose(-1, -2))
    S = S.reshape(batch, heads, num_rows, -1)
    if options.softcap > 0:
        S = options.softcap * torch.tanh(S / options.softcap)
    visible = where.visible
    if leaves.bias is not None:
        bias = block_of(leaves.bias, where).to(dtype)
        visible = visible & (bias.detach() != -math.inf)
        S = S + bias.masked_fill(~visible, 0.0)
    if arrays.alibi_slopes is not None:
        slopes = arrays.alibi_slopes.to(dtype)[..., None, None]
        S = S - slopes * where.distance
    S = S.masked_fill(~visible, -math.inf)
    row_max = S.detach().amax(-1, keepdim=True) if S.shape[-1] else S.new_zeros(*S.shape[:-1], 1)
    is_empty = row_max == -math.inf
    row_max = row_max.masked_fill(is_empty, 0.0)
    top = row_max
    sinks = None
    if leaves.sinks is not None:
        sinks = leaves.sinks.to(dtype)[:, None, None]
        top = torch.maximum(row_max, sinks.detach())
    e = torch.exp(S - top)
    row_sum = e.sum(-1, keepdim=True)
    total = row_sum if sinks is None else row_sum + torch.exp(sinks - top)
    P = e / total.masked_fill(is_empty, 1.0)
    if options.dropout_p > 0:
        P = P * drop_factors(options.dropout_p, arrays.rng, where, heads).to(dtype)
    o = P.reshape(batch, kv_heads, heads // kv_heads, num_rows, -1) @ V.unsqueeze(2)
    keys = torch.exp(S - row_max).sum(-1, keepdim=True) if sinks is not None else row_sum
    lse = (row_max + torch.log(keys.masked_fill(is_empty, 1.0))).masked_fill(is_empty, -math.inf)
    out_dtype = meaning.out_dtype or q.dtype
    return o.reshape(batch, heads, num_rows, -1).to(out_dtype), lse.squeeze(-1)


def blocks(arrays: Any, meaning: Meaning) -> Iterator[tuple[slice, Callable[..., Any]]]:
    """Blocks of query rows; with each the function (q of these rows, leaves) -> (o, lse)."""
    q = heads_first(arrays.q, meaning.layout)
    k = heads_first(arrays.k, meaning.layout)
    num_q, num_kv = q.shape[-2], k.shape[-2]
    step = max(1, BLOCK_ELEMS // max(1, q.shape[0] * q.shape[1] * num_kv))
    for first in range(0, num_q, step):
        rows = slice(first, min(first + step, num_q))
        where = geometry_of(arrays, meaning, q.shape[0], num_q, num_kv, rows)

        def of_rows(block: Tensor, leaves: Leaves, where: Geometry = where) -> Any:
            with torch.autocast(q.device.type, enabled=False):
                return attention_rows(leaves, block, meaning, arrays, where)

        yield rows, of_rows
