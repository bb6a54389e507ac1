# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Schedules: in which order the keys of all ranks come to each, and their gradients go back.

gather  every rank gets all keys, then calls once for each of its segments: nothing is merged. Where
        there are many heads they go in groups: one computes while the next travels.
ring    keys go from rank to rank; each rank has two sets at a time, one that it computes with and
        one that arrives. Gradients of keys follow one step behind (Liu et al., Ring Attention,
        2023). It ends with the step behind which no rank sees anything.

Rows travel first, (row, batch, head, dim), as many as the rank with most has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .parts import Heads, Segment, parts_of
from .shards import Shards
from .steps import Incoming, Result, Sums, merges, sums_of
from .transports import Pending, Transport

if TYPE_CHECKING:
    from .problem import Problem, Side


class Saved(NamedTuple):
    """Of a forward pass, for its backward pass."""

    o: Tensor
    stats: Tensor


class Job(NamedTuple):
    """A problem among the ranks of a transport."""

    problem: Problem
    transport: Transport
    shards: Shards
    heads: Heads  # those that the q, k and v of the schedule have
    groups: int  # of heads, each gathered while another computes; 0: as many as pay

    def rows_of(self, rank: int) -> Side:
        return self.problem.side(self.shards.segments[rank], False)

    def keys_of(self, rank: int) -> Side:
        return self.problem.side(self.shards.segments[rank], True)

    @property
    def rank(self) -> int:
        return self.transport.rank


def packed(x: Tensor, rows: int) -> Tensor:
    """(batch, head, row, dim) as it travels: (rows, batch, head, dim), the last rows anything."""
    moved = x.permute(2, 0, 1, 3)
    if moved.shape[0] == rows:
        return moved.contiguous()
    found = x.new_zeros((rows, *moved.shape[1:]))
    found[: moved.shape[0]] = moved
    return found


def unpacked(x: Tensor, rows: int) -> Tensor:
    """(batch, head, rows, dim), a view, of what travelled."""
    return x[:rows].permute(1, 2, 0, 3)


def order_of(shards: Shards, device: Any) -> Tensor:
    """Where each row of the sequence is among the rows of all ranks, one behind the other."""
    found = torch.empty(shards.length, dtype=torch.int64)
    for rank, segments in enumerate(shards.segments):
        at = rank * shards.most_rows
        for first, rows in segments:
            found[first : first + rows] = torch.arange(at, at + rows)
            at += rows
    return found.to(device)


class Gather:
    """All keys to all ranks."""

    name = "gather"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.order = order_of(job.shards, job.problem.device)
        self.rows = job.rows_of(job.rank)
        self.keys = job.problem.side((Segment(0, job.shards.length),), True)

    def _groups(self, k: Tensor) -> list[tuple[Heads, slice, slice]]:
        """Heads that are gathered together, with their places in q and in k."""
        own, kv_heads = self.job.heads, k.shape[1]
        per_kv = (own.q[1] - own.q[0]) // kv_heads
        count = self.job.groups or groups_of(self.job.transport.size, k)
        step = kv_heads // count
        found = []
        for at in range(0, kv_heads, step):
            q_at = slice(at * per_kv, (at + step) * per_kv)
            kv = (own.kv[0] + at, own.kv[0] + at + step)
            heads = Heads((own.q[0] + q_at.start, own.q[0] + q_at.stop), kv,
                          own.is_all and step == kv_heads)  # fmt: skip
            found.append((heads, q_at, slice(at, at + step)))
        return found

    def _start(self, tensors: Sequence[Tensor]) -> list[Pending]:
        rows = self.job.shards.most_rows
        return [self.job.transport.gather(packed(x, rows)) for x in tensors]

    def _all(self, pending: Sequence[Pending]) -> list[Tensor]:
        """Keys in the order of the sequence, (batch, head, row, dim)."""
        found = [x.wait().flatten(0, 1).index_select(0, self.order) for x in pending]
        return [x.permute(1, 2, 0, 3) for x in found]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        job, sinks = self.job, self.job.problem.sinks
        result = Result(q, v.shape[-1], merges(job.problem, self.rows, [self.keys]))
        groups = self._groups(k)
        waiting = self._start([x[:, groups[0][2]] for x in (k, v)])
        for index, (heads, of_q, _) in enumerate(groups):
            all_k, all_v = self._all(waiting)
            if index + 1 < len(groups):
                waiting = self._start([x[:, groups[index + 1][2]] for x in (k, v)])
            part = result.of_heads(of_q)
            part.attend(job.problem, heads, q[:, of_q], all_k, all_v, self.rows, self.keys)
        o = result.finished(None if sinks is None else job.heads.of(sinks))
        return o, Saved(o, result.stats)

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        groups = self._groups(k)
        waiting = self._start([x[:, groups[0][2]] for x in (k, v)])
        returning = []
        for index, (heads, of_q, _) in enumerate(groups):
            all_k, all_v = self._all(waiting)
            if index + 1 < len(groups):
                waiting = self._start([x[:, groups[index + 1][2]] for x in (k, v)])
            dk, dv = (x.new_zeros(x.shape, dtype=sums_of(x.dtype)) for x in (all_k, all_v))
            sums.attend(job.problem, heads, given.of_heads(of_q), all_k, all_v,
                        self.rows, self.keys, sums.dq[:, of_q], dk, dv)  # fmt: skip
            returning.append([self._home(x) for x in (dk, dv)])
        found = [self._received(column) for column in zip(*returning)]
        return found[0].to(k.dtype), found[1].to(v.dtype)

    def _home(self, x: Tensor) -> Pending:
        """Gradients of all keys to the ranks that have them."""
        size, rows = self.job.transport.size, self.job.shards.most_rows
        found = x.new_zeros((size * rows, *x.permute(2, 0, 1, 3).shape[1:]))
        found.index_copy_(0, self.order, x.permute(2, 0, 1, 3))
        return self.job.transport.exchange(found.unflatten(0, (size, rows)))

    def _received(self, column: Sequence[Pending]) -> Tensor:
        """The sum over ranks, in their order, of all groups of heads."""
        rows = self.job.shards.rows(self.job.rank)
        return torch.cat([unpacked(x.wait().sum(0), rows) for x in column], dim=1)


# Bytes of k that a group of heads has on a rank, at least: below them a group is not worth a call.
_LEAST_GROUP = 8 << 20


def groups_of(size: int, k: Tensor) -> int:
    """How many groups of heads the gather goes in."""
    bytes_ = k.numel() * k.element_size()
    fitting = [n for n in (4, 2) if k.shape[1] % n == 0 and bytes_ >= n * _LEAST_GROUP]
    return fitting[0] if fitting and size > 1 else 1


class Ring:
    """Keys from rank to rank."""

    name = "ring"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows = job.rows_of(job.rank)
        self.steps = ring_steps(job.problem, job.shards)

    def _source(self, step: int) -> Side:
        size = self.job.transport.size
        return self.job.keys_of((self.job.rank - step) % size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        job, sinks = self.job, self.job.problem.sinks
        every = [self._source(step) for step in range(self.steps)]
        result = Result(q, v.shape[-1], merges(job.problem, self.rows, every))
        here = [packed(x, job.shards.most_rows) for x in (k, v)]
        for step, keys in enumerate(every):
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            own_k, own_v = (unpacked(x, len(keys.positions)) for x in here)
            result.attend(job.problem, job.heads, q, own_k, own_v, self.rows, keys)
            here = here if arriving is None else arriving.wait()
        o = result.finished(None if sinks is None else job.heads.of(sinks))
        return o, Saved(o, result.stats)

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        here = [packed(x, job.shards.most_rows) for x in (k, v)]
        following: Pending | None = None  # gradients of the keys of the next step, so far
        for step in range(self.steps):
            keys = self._source(step)
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            grads = [torch.zeros_like(x, dtype=sums_of(x.dtype)) for x in here]
            own = (unpacked(x, len(keys.positions)) for x in (*here, *grads))
            own_k, own_v, dk, dv = own
            sums.attend(job.problem, job.heads, given, own_k, own_v, self.rows, keys,
                        sums.dq, dk, dv)  # fmt: skip
            if following is not None:
                grads = [mine + other for mine, other in zip(grads, following.wait())]
            if arriving is not None:
                following = job.transport.shift(grads, 1)
                here = arriving.wait()
        if self.steps > 1:  # what the last step had goes to its owner
            grads = job.transport.shift(grads, 1 - self.steps).wait()
        rows = job.shards.rows(job.rank)
        return unpacked(grads[0], rows).to(k.dtype), unpacked(grads[1], rows).to(v.dtype)


def ring_steps(problem: Problem, shards: Shards) -> int:
    """Steps until no rank sees anything of what is still to come."""
    size = len(shards.segments)
    for step in reversed(range(1, size)):
        for rank in range(size):
            keys = shards.segments[(rank - step) % size]
            if parts_of(shards.segments[rank], keys, problem.band, problem.may_join):
                return step + 1
    return 1


SCHEDULES = {"gather": Gather, "ring": Ring}
