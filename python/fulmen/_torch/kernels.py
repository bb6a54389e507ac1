# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What an operator does on plain tensors: memory for the results, one call of the library.

Results are laid out in memory as the tensor that they belong to: o and dq as q, dk as k, dv as v.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import BACKWARD_RESULTS, FORWARD_RESULTS, Where, library, run
from ..arrays import torch_checked
from ..choices import Layout
from ..kinds import CURRENT_STREAM, NO_STREAM, TorchKind
from ..merging import merge_arrays
from ..settled import settled
from .settings import DIFFERENTIABLE, NUM_ARRAYS, Arrays, Settings

# `outputs` of fulmen::attention: o, and ...
O_ONLY, WITH_LSE, WITH_STATS, STATS_ONLY = 1, 2, 3, 4

_ON_CPU: Where = (NO_STREAM, TorchKind)
_ON_GPU: Where = (CURRENT_STREAM, TorchKind)


def accumulator(dtype: Any) -> Any:
    """The dtype of lse and stats."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def like(x: Tensor) -> Tensor:
    """Memory for a gradient: the extents and the memory order of x."""
    if x.is_contiguous() or x.stride(-1) == 1:
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def o_like(q: Tensor, v: Tensor, out_dtype: Any) -> Tensor:
    """Memory for o: the extents of q with the last axis of v, in the memory order of q."""
    dim = v.shape[-1]
    if q.stride(-1) == 1:
        if dim == q.shape[-1]:
            return (
                torch.empty_like(q) if out_dtype is None else torch.empty_like(q, dtype=out_dtype)
            )
        order = sorted(range(q.dim() - 1), key=lambda axis: -q.stride(axis))
        shape = (*q.shape[:-1], dim)
        return torch.empty_permuted(
            shape, (*order, q.dim() - 1), dtype=out_dtype or q.dtype, device=q.device
        )
    return q.new_empty((*q.shape[:-1], dim), dtype=out_dtype)


def lse_like(q: Tensor, layout: str, *last: int) -> Tensor:
    """Memory for lse, or with one more axis for stats."""
    shape = q.shape[:-1]
    if layout in ("bshd", "shd"):
        shape = (*shape[:-2], shape[-1], shape[-2])
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return q.new_empty(*shape, *last)  # torch reads separate numbers faster than a tuple
    return q.new_empty(*shape, *last, dtype=torch.float32)


def forward_results(q: Tensor, v: Tensor, settings: Settings, outputs: int) -> tuple[Any, ...]:
    """Memory for (o, lse, stats), those that `outputs` asks for."""
    if q.shape == v.shape and settings.out_dtype is None and q.is_contiguous():
        o = torch.empty_like(q)  # o_like, for most calls
    else:
        o = o_like(q, v, settings.out_dtype)
    if outputs == O_ONLY:
        return o, None, None
    lse = None if outputs == STATS_ONLY else lse_like(q, settings.layout)
    return o, lse, None if outputs == WITH_LSE else lse_like(q, settings.layout, 2)


class Ready(NamedTuple):
    """What the library reads beside the arrays."""

    numbers: tuple[float, ...]
    layout: Layout


@lru_cache(maxsize=1024)
def ready_of(settings: Settings, packed: bool, rng: Any = None) -> Ready:
    """The numbers of fulmen_problem; remembered, since they follow from values alone.

    Args:
        settings: of the operator.
        packed: whether cu_q is given.
        rng: (seed, offset) where the host knows them; (0, 0) where a tensor on a GPU does.
    """
    return Ready(
        *settled.__wrapped__(
            settings.scale,
            settings.softcap,
            settings.causal,
            settings.alignment,
            (settings.window_left, settings.window_right),
            settings.prefix,
            settings.chunk,
            settings.dropout_p,
            rng,
            settings.max_q or None,
            settings.max_kv or None,
            settings.deterministic,
            settings.batch_invariant,
            settings.backend,
            settings.implementation,
            settings.layout,
            packed,
            settings.precision,
        )
    )


def prepared(
    arrays: tuple[Any, ...], settings: Settings, ready: Ready | None
) -> tuple[Ready, tuple[Any, ...], Where]:
    """Numbers, arrays and stream, as fulmen.options.prepare would have them from keywords."""
    q, k, v, bias = arrays[:4]
    where = _ON_CPU
    rng = arrays[-1]
    if q.is_cuda:
        where = _ON_GPU
    if rng is not None:
        if q.is_cuda:
            ready = ready_of(settings, arrays[9] is not None, (0, 0))
        else:
            seed, offset = rng.tolist()
            lots = seed % 2**64, offset
            ready = ready_of.__wrapped__(settings, arrays[9] is not None, lots)
            arrays = (*arrays[:-1], None)
    elif ready is None:
        ready = ready_of(settings, arrays[9] is not None)
    rank = ready.layout.rank
    if not (q.dim() == k.dim() == v.dim() == rank):
        ready.layout.check_all(q, k, v)
    if q.is_neg() or k.is_neg() or v.is_neg() or (bias is not None and bias.is_neg()):
        arrays = torch_checked(arrays)
    if arrays[11] is not None and arrays[12] is None:  # ids of keys: those of the queries
        arrays = (*arrays[:12], arrays[11], *arrays[13:])
    return ready, arrays, where


def run_forward(
    arrays: tuple[Any, ...],
    settings: Settings,
    outputs: int,
    results: Any = None,
    ready: Ready | None = None,
) -> tuple[Any, ...]:
    """(o, lse, stats) of plain tensors; None for what `outputs` leaves out."""
    ready, arrays, where = prepared(arrays, settings, ready)
    if results is None:
        results = forward_results(arrays[0], arrays[2], settings, outputs)
    rows_first = ready.layout.rows_before_heads
    run(library().forward, ready.numbers, where, rows_first, arrays + results, FORWARD_RESULTS)
    return results  # type: ignore[no-any-return]


def run_backward(
    do: Any,
    dlse: Any,
    o: Tensor,
    stats: Tensor,
    arrays: tuple[Any, ...],
    settings: Settings,
    need: Sequence[bool],
    ready: Ready | None = None,
) -> tuple[Any, ...]:
    """(dq, dk, dv, dbias, dsinks) of plain tensors; None where `need` does not ask."""
    gradients = tuple(
        [like(arrays[place]) if wanted else None for place, wanted in zip(DIFFERENTIABLE, need)]
    )
    if not any(need):
        return gradients
    if do is None:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
    elif do.is_neg():
        do = do.resolve_neg()
    ready, arrays, where = prepared(arrays, settings, ready)
    sums = (None, stats) if stats.dim() == o.dim() else (stats, None)  # or lse of a caller's own
    saved = (o, *sums, do, dlse)
    rows_first = ready.layout.rows_before_heads
    every = arrays + saved + gradients
    run(library().backward, ready.numbers, where, rows_first, every, BACKWARD_RESULTS)
    return gradients


def split(args: tuple[Any, ...]) -> tuple[Arrays, Settings, tuple[Any, ...]]:
    """An operator's arguments: arrays, settings, and what follows."""
    end = NUM_ARRAYS + len(Settings._fields)
    return Arrays(*args[:NUM_ARRAYS]), Settings(*args[NUM_ARRAYS:end]), args[end:]


def run_merge(
    os: list[Tensor], lses: list[Tensor], sinks: Any, layout: str, out_dtype: Any
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the union of the parts' keys."""
    os = [x.resolve_neg() for x in os]
    o, lse = merge_arrays(list(zip(os, lses)), sinks, layout, out_dtype)
    return o, lse
