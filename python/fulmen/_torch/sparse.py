# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of sparse latent attention: each query row over the rows of a cache in its list.

Forward the cache is read where it lies. Backward some query rows at a time have their keys beside
each other, as many as fit a fixed room: memory is linear in the lists and in the cache. The
gradient of a row of the cache, as key and as value, is summed over all lists that name it, in
float32 or float64, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import UnsupportedError
from ..functional import attention_backward, attention_forward
from ..page_tables import is_records

ROOM_BYTES = 1 << 28  # of keys that lie beside each other


def needs_gradients(tensors: tuple[Any, ...]) -> bool:
    """Whether a call over such tensors records itself.

    Raises:
        UnsupportedError: one of them is a cache of records, which has no gradients.
    """
    if not torch.is_grad_enabled():
        return False
    if not any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return False
    if any(is_records(x) for x in tensors if x is not None):
        raise UnsupportedError(
            "kv is records where a tensor requires grad; backward does not take records: pass the "
            "cache in the dtype of q, or call under torch.no_grad()"
        )
    return True


def attention_over_slots(
    q: Tensor, pool: Tensor, table: Any, lengths: Any, dim_v: int, options: dict[str, Any]
) -> Any:
    """(o, lse) of q (row, 1, head, dim) over slots (row, topk) of a pool (page, row, 1, dim)."""
    table, lengths = (torch.as_tensor(x, device=q.device) for x in (table, lengths))
    return SparseAttention.apply(q, pool, table, lengths, dim_v, options)


class SparseAttention(torch.autograd.Function):
    """attention_over_slots, which differentiates once, in q and in the pool."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        pool: Tensor,
        table: Tensor,
        lengths: Tensor,
        dim_v: int,
        options: dict[str, Any],
    ) -> Any:
        found = attention_forward(
            q, pool, pool[..., :dim_v], page_table=table, kv_lengths=lengths, slots=True,
            layout="bshd", **options,
        )  # fmt: skip
        ctx.save_for_backward(q, pool, table, lengths, found.o, found.stats)
        ctx.dim_v = dim_v
        ctx.options = {name: x for name, x in options.items() if name != "out_dtype"}
        ctx.set_materialize_grads(False)
        return found.o, found.lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        q, pool, table, lengths, o, stats = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 6
        do = torch.zeros_like(o) if do is None else do
        dim, topk = q.shape[-1], table.shape[-1]
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        dq = torch.empty_like(q)
        rows_of_pool = pool.reshape(-1, dim)
        dpool = torch.zeros(rows_of_pool.shape, dtype=wide, device=pool.device)
        count = max(ROOM_BYTES // (topk * dim * q.element_size()), 1)
        for begin in range(0, q.shape[0], count):
            rows = slice(begin, begin + count)
            entry = torch.arange(topk, device=table.device)
            visible = (table[rows] >= 0) & (entry < lengths[rows, None])
            slots = torch.where(visible, table[rows], 0).long()
            k = rows_of_pool[slots][:, :, None]
            found = attention_backward(
                do[rows], q[rows], k, k[..., : ctx.dim_v], o[rows], stats[rows],
                dlse=None if dlse is None else dlse[rows], mask=visible[:, None, None],
                layout="bshd", **ctx.options,
            )  # fmt: skip
            dq[rows] = found.dq
            dk = found.dk[:, :, 0].to(wide)
            dk[..., : ctx.dim_v] += found.dv[:, :, 0].to(wide)
            if ctx.options.get("deterministic"):  # in the order of the slots
                dpool.index_put_((slots.flatten(),), dk.flatten(0, 1), accumulate=True)
            else:
                dpool.index_add_(0, slots.flatten(), dk.flatten(0, 1))
        return dq, dpool.to(pool.dtype).view(pool.shape), None, None, None, None
