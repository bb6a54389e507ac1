# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a few query rows as plain differentiable operations of torch.

What has no kernel of its own is composed from it, block by block: forward mode, and the derivatives
of the gradients (derivatives.py). Which keys the rows see is found in geometry.py.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._library import schema

if TYPE_CHECKING:
    from .geometry import Geometry


class Meaning(NamedTuple):
    """What the settings of a call say, to be read by name."""

    options: Any  # the fields of fulmen_problem
    layout: str
    is_top_left: bool
    out_dtype: Any


def accumulator(dtype: Any) -> Any:
    """The dtype of lse and stats."""
    return torch.float64 if dtype is torch.float64 else torch.float32


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
    i, j = where.drawn
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


# What can be differentiated, by name, axes (batch, head, row, dim); what is behind v may be None.
_of_names: Any = namedtuple  # whose names are known in the run
_leaf_names = schema().differentiable_inputs
Leaves = _of_names("Leaves", _leaf_names, defaults=(None,) * (len(_leaf_names) - 3))
# Tensor arguments of an operator: the inputs of a call by name; all behind v may be None.
Arrays = _of_names("Arrays", schema().inputs, defaults=(None,) * (len(schema().inputs) - 3))


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


def _seen(where: Geometry) -> Tensor:
    """The keys that any row sees: (batch or 1, 1, kv_row, 1)."""
    return where.visible.any(-2).any(1)[:, None, :, None]


def scores_of_rows(
    leaves: Any, q: Tensor, meaning: Meaning, arrays: Any, where: Geometry
) -> Tensor:
    """S = softcap(scale * (q K^T)) + bias - slopes * distance, -inf where hidden."""
    options = meaning.options
    dtype = accumulator(q.dtype)
    batch, heads, num_rows, dim = q.shape
    kv_heads = leaves.k.shape[1]
    K = leaves.k.to(dtype).masked_fill(~_seen(where), 0.0)
    scale = 1.0 / math.sqrt(max(dim, 1)) if math.isnan(options.scale) else options.scale
    grouped = q.to(dtype).reshape(batch, kv_heads, heads // kv_heads, num_rows, dim)
    S = scale * (grouped @ K.unsqueeze(2).transpose(-1, -2))
    S = S.reshape(batch, heads, num_rows, -1)
    if options.softcap > 0:
        S = options.softcap * torch.tanh(S / options.softcap)
    visible = where.visible
    if leaves.bias is not None:
        bias = where.part(leaves.bias).to(dtype)
        visible = visible & (bias.detach() != -math.inf)
        S = S + bias.masked_fill(~visible, 0.0)
    if arrays.alibi_slopes is not None:
        slopes = arrays.alibi_slopes.to(dtype)[..., None, None]
        S = S - slopes * where.distance
    return S.masked_fill(~visible, -math.inf)


def attention_rows(
    leaves: Any, q: Tensor, meaning: Meaning, arrays: Any, where: Geometry
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the rows of `where`, whose queries are q: the equations of the semantics.

    m = rowmax S;  e = exp(S - m);  l = rowsum e;  o = (e / l_total * drop) V;  lse = m + log l
    """
    options = meaning.options
    dtype = accumulator(q.dtype)
    batch, heads, num_rows, _ = q.shape
    kv_heads = leaves.k.shape[1]
    V = leaves.v.to(dtype).masked_fill(~_seen(where), 0.0)
    S = scores_of_rows(leaves, q, meaning, arrays, where)
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
