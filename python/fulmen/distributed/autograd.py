# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A call of `ContextParallel.attention`, with its gradients.

Where ranks share rows by heads, each of q, k and v first goes from some rows of all heads to all of
their rows of some heads, and o comes back: two exchanges that are each other's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from .parts import Heads
from .problem import Problem
from .schedules import SCHEDULES, Job, order_of, padded
from .shards import Shards
from .steps import Gradients, Incoming, Saved, Sums, sink_gradient
from .transports import Transport


class Call:
    """q, k and v of a rank, and what is asked of them; a refusal comes before anything moves."""

    def __init__(
        self, transports: tuple[Transport, Transport], rank: int, shards: Shards, schedule: str,
        arrays: tuple[Tensor, Tensor, Tensor], layout: str, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.near, self.far = transports
        self.shards, self.layout, self.schedule = shards, layout, schedule
        q, k, v = arrays
        self._check(rank, q, k, v)
        self.problem = Problem(options, shards.length, q.device)
        if self.problem.dropped and self.near.size > 1:
            raise UnsupportedError(
                "dropout_p is given where ranks share rows by heads, and its pattern counts all "
                'heads: schedule="gather" and "ring" read it'
            )
        heads = [x.shape[1 if layout == "bhsd" else 2] for x in (q, k)]
        self.repeats = max(1, self.near.size // heads[1])  # of key/value heads that are too few
        self.said = self._sentence(q, k, v, options)

    def _check(self, rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        head, row = (1, 2) if self.layout == "bhsd" else (2, 1)
        rows = self.shards.rows(rank)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise DTypeError(f"{name} is {type(x).__name__}; a PyTorch tensor is expected")
            if x.dim() != 4 or x.shape[row] != rows:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}; layout={self.layout!r} with the {rows} "
                    f"rows that rank {rank} has of {self.shards.length} is expected"
                )
            if x.dtype != q.dtype or not x.dtype.is_floating_point or x.element_size() < 2:
                raise DTypeError(
                    f"{name} has dtype {x.dtype}, q {q.dtype}; one of float64, float32, float16 "
                    "and bfloat16 for all is allowed"
                )
            if x.shape[0] != q.shape[0] or x.device != q.device:
                raise ShapeError(f"{name} has another batch or device than q")
        heads, kv_heads = q.shape[head], k.shape[head]
        is_shared = v.shape[head] == kv_heads >= 1 and heads % kv_heads == 0
        if not is_shared or q.shape[3] != k.shape[3]:
            raise ShapeError(
                f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; heads of q "
                "a multiple of those of k and v, and dims of q and k alike, are expected"
            )
        size = self.near.size
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ArgumentError(
                f"{heads} heads and {kv_heads} key/value heads do not go over {size} ranks by "
                "heads; a divisor of the heads that divides the key/value heads, or is a multiple "
                'of them, does, and so does schedule="ring"'
            )

    def _sentence(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str:
        """What must be alike on all ranks, in one line."""
        row = 2 if self.layout == "bhsd" else 1
        shapes = [tuple(n for axis, n in enumerate(x.shape) if axis != row) for x in (q, k, v)]
        said = {name: _shown(x) for name, x in sorted(options.items()) if x is not None}
        # of the segments their sum, so that two ranks with other layouts find out
        segments = hash(self.shards.segments) & 0xFFFFFFFF
        return (
            f"{self.shards.length} rows {self.shards.name} {segments:08x} by {self.schedule} over "
            f"{self.near.size} x {self.far.size}, q, k, v {shapes} {self.layout} "
            f"{str(q.dtype)[6:]}, {said}"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
        """(o, lse) of the rows of the rank, and what its gradients are computed from."""
        q, k, v = (self._heads_first(x) for x in (q, k, v))
        near = self._near()
        if self.repeats > 1:
            k, v = (x.repeat_interleave(self.repeats, 1) for x in (k, v))
        q, k, v = (near.to_heads(x) for x in (q, k, v))
        o, stats = self._schedule(q, k).forward(q, k, v)
        lse = stats[..., 0] + stats[..., 1].log()
        saved = Saved(q, k, v, o, stats)
        lse = near.to_rows(lse.unsqueeze(-1)).squeeze(-1)
        return self._heads_first(near.to_rows(o)), lse, saved

    def backward(
        self, do: Tensor | None, dlse: Tensor | None, saved: Saved, wanted: tuple[str, ...]
    ) -> Gradients:
        """Gradients of q, k and v, of sinks, and of the arrays of that name that texts read."""
        near = self._near()
        if do is not None:
            do = near.to_heads(self._heads_first(do))
        if dlse is not None:
            dlse = near.to_heads(dlse.unsqueeze(-1)).squeeze(-1)
        schedule = self._schedule(saved.q, saved.k)
        sums = Sums(saved.q, wanted, schedule.merges)
        do = torch.zeros_like(saved.o) if do is None else do
        given = Incoming(do, dlse, saved.o, saved.stats, saved.q)
        dk, dv = schedule.backward(given, saved.k, saved.v, sums)
        dq = sums.dq.to(saved.q.dtype)
        dsinks, sinks = None, self.problem.sinks
        if sinks is not None:
            heads = schedule.job.heads
            dsinks = torch.zeros_like(sinks)
            heads.of(dsinks).copy_(sink_gradient(heads.of(sinks), do, saved.o, saved.stats))
        dq, dk, dv = (near.to_rows(x) for x in (dq, dk, dv))
        if self.repeats > 1:
            dk, dv = (x.unflatten(1, (-1, self.repeats)).sum(2) for x in (dk, dv))
        dq, dk, dv = (self._heads_first(x) for x in (dq, dk, dv))
        return Gradients(dq, dk, dv, dsinks, sums.captures)

    def _heads_first(self, x: Tensor) -> Tensor:
        """The caller's order from (batch, head, row, dim), and back."""
        return x.transpose(1, 2) if self.layout == "bshd" else x

    def _schedule(self, q: Tensor, k: Tensor) -> Any:
        """That of this rank's heads; q and k as it has them."""
        size, at = self.near.size, self.near.rank
        first = at * (k.shape[1] * size // self.repeats) // size
        heads = Heads(
            (at * q.shape[1], (at + 1) * q.shape[1]), (first, first + k.shape[1]), size == 1
        )
        job = Job(self.problem, self.far, self.shards.merged(self.far.size), heads)
        return SCHEDULES[self.schedule](job)

    def _near(self) -> _Near:
        """The ranks that share rows by heads, and where the rows of each go."""
        size = self.near.size
        first = self.far.rank * size
        segments = self.shards.segments[first : first + size]
        starts = sorted(x for each in segments for x in each)
        places, at = {}, 0
        for first, rows in starts:
            places[first] = at
            at += rows
        local = Shards("near", tuple(
            tuple(x._replace(first=places[x.first]) for x in each) for each in segments
        ))  # fmt: skip
        return _Near(self.near, local)


def _shown(x: Any) -> str:
    """An option as a sentence that ranks compare has it: arrays by their shapes."""
    if hasattr(x, "shape"):
        return f"{tuple(x.shape)}"
    if isinstance(x, (tuple, list)) and len(x) < 8:
        return str([_shown(y) for y in x])
    fields = getattr(x, "__dict__", None)
    if fields:
        return str({name: _shown(y) for name, y in fields.items()})
    if isinstance(x, dict):
        return str({name: _shown(y) for name, y in x.items()})
    return str(x)[:100]


class _Near:
    """Ranks among which rows and heads are exchanged."""

    def __init__(self, transport: Transport, shards: Shards) -> None:
        self.transport, self.shards = transport, shards

    def to_heads(self, x: Tensor) -> Tensor:
        """(batch, head, row, dim) of this rank's rows -> its heads, of all their rows."""
        size = self.transport.size
        if size == 1:
            return x
        sent = padded(x.unflatten(1, (size, -1)).movedim(1, 0), self.shards.most_rows, 3)
        found = self.transport.exchange(sent).wait().permute(1, 2, 0, 3, 4).flatten(2, 3)
        return found.index_select(2, order_of(self.shards, x.device))

    def to_rows(self, x: Tensor) -> Tensor:
        """The way back."""
        size, rows = self.transport.size, self.shards.most_rows
        if size == 1:
            return x
        moved = x.permute(2, 0, 1, 3)
        sent = x.new_zeros((size * rows, *moved.shape[1:]))
        sent.index_copy_(0, order_of(self.shards, x.device), moved)
        found = self.transport.exchange(sent.unflatten(0, (size, rows))).wait()
        own = self.shards.rows(self.transport.rank)
        return found[:, :own].permute(2, 0, 3, 1, 4).flatten(1, 2)


class Attention(torch.autograd.Function):
    """(call, names of captures, q, k, v, sinks, *captures) -> (o, lse)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, names: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor,
        sinks: Any, *captures: Tensor,
    ) -> Any:  # fmt: skip
        o, lse, saved = call.forward(q, k, v)
        ctx.call, ctx.names = call, names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *captures)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        q, k, v, o, stats, *captures = ctx.saved_tensors
        needs = dict(zip(ctx.names, ctx.needs_input_grad[6:]))
        wanted = tuple(name for name, need in needs.items() if need)
        found = ctx.call.backward(do, dlse, Saved(q, k, v, o, stats), wanted)
        of_captures = [
            found.of_capture(name, x) if needs[name] else None
            for name, x in zip(ctx.names, captures)
        ]
        return (None, None, *found[:4], *of_captures)


class Unshard(torch.autograd.Function):
    """(transport, shards, x, dim) -> the whole sequence."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, shards: Shards, x: Tensor, dim: int) -> Tensor:
        ctx.own, ctx.dim = shards.segments[transport.rank], dim
        moved = x.movedim(dim, 0)
        sent = x.new_zeros((shards.most_rows, *moved.shape[1:]))
        sent[: moved.shape[0]] = moved
        found = transport.gather(sent).wait().flatten(0, 1)
        return found.index_select(0, order_of(shards, x.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        runs = [gradient.narrow(ctx.dim, first, rows) for first, rows in ctx.own]
        return None, None, torch.cat(runs, ctx.dim), None
