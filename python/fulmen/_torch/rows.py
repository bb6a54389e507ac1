# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a few query rows as plain differentiable operations of torch.

What has no kernel of its own is composed from it: forward mode, and the derivatives of the
gradients. Blocks of rows follow one another, each with at most BLOCK_ELEMS scores per tensor, so
that memory is linear in the sequence; time is that of the naive method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from .philox import drop_factors
from .settings import Arrays, Settings
from .visibility import Geometry, block_of, geometry_of

BLOCK_ELEMS = 1 << 22


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
    leaves: Leaves, q: Tensor, settings: Settings, arrays: Arrays, where: Geometry
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the rows of `where`, whose queries are q: the equations of semantics, in order.

    S = softcap(scale * (q K^T)) + bias - slopes * distance;  m = rowmax S;  e = exp(S - m)
    l = rowsum e;  o = (e / l_total * drop) V;  lse = m + log l
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, num_rows, dim = q.shape
    kv_heads = leaves.k.shape[1]
    seen = where.visible.any(-2).any(1)[:, None, :, None]  # (batch or 1, 1, kv_row, 1)
    K = leaves.k.to(dtype).masked_fill(~seen, 0.0)
    V = leaves.v.to(dtype).masked_fill(~seen, 0.0)
    scale = 1.0 / math.sqrt(max(dim, 1)) if settings.scale is None else settings.scale
    grouped = q.to(dtype).reshape(batch, kv_heads, heads // kv_heads, num_rows, dim)
    S = scale * (grouped @ K.unsqueeze(2).transpose(-1, -2))
    S = S.reshape(batch, heads, num_rows, -1)
    if settings.softcap > 0:
        S = settings.softcap * torch.tanh(S / settings.softcap)
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
    if settings.dropout_p > 0:
        P = P * drop_factors(settings.dropout_p, arrays.rng, where, heads).to(dtype)
    o = P.reshape(batch, kv_heads, heads // kv_heads, num_rows, -1) @ V.unsqueeze(2)
    keys = torch.exp(S - row_max).sum(-1, keepdim=True) if sinks is not None else row_sum
    lse = (row_max + torch.log(keys.masked_fill(is_empty, 1.0))).masked_fill(is_empty, -math.inf)
    out_dtype = settings.out_dtype or q.dtype
    return o.reshape(batch, heads, num_rows, -1).to(out_dtype), lse.squeeze(-1)


def blocks(arrays: Arrays, settings: Settings) -> Iterator[tuple[slice, Callable[..., Any]]]:
    """Blocks of query rows; with each the function (q of these rows, leaves) -> (o, lse)."""
    q = heads_first(arrays.q, settings.layout)
    k = heads_first(arrays.k, settings.layout)
    num_q, num_kv = q.shape[-2], k.shape[-2]
    step = max(1, BLOCK_ELEMS // max(1, q.shape[0] * q.shape[1] * num_kv))
    for first in range(0, num_q, step):
        rows = slice(first, min(first + step, num_q))
        where = geometry_of(arrays, settings, q.shape[0], num_q, num_kv, rows)

        def of_rows(block: Tensor, leaves: Leaves, where: Geometry = where) -> Any:
            with torch.autocast(q.device.type, enabled=False):
                return attention_rows(leaves, block, settings, arrays, where)

        yield rows, of_rows
