# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Schedules: in which order the keys of all ranks come to each, and their gradients go back.

gather  every rank gets all keys, then calls once for each of its segments: nothing is merged. Where
        there are many heads they go in groups: one computes while the next travels.
ring    keys go from rank to rank; each rank has two sets at a time, one that it computes with and
        one that arrives. Gradients of keys follow one step behind (Liu et al., Ring Attention,
        2023). It ends with the step behind which no rank sees anything.

All ranks send as many rows as the one with most has. What calls read is contiguous by head: rows of
a head that lie far apart cost the copy engine, where keys are more than the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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

    def rows_of(self, rank: int) -> Side:
        return self.problem.side(self.shards.segments[rank], False)

    def keys_of(self, rank: int) -> Side:
        return self.problem.side(self.shards.segments[rank], True)

    @property
    def rank(self) -> int:
        return self.transport.rank


def padded(x: Tensor, rows: int, dim: int) -> Tensor:
    """x contiguous with `rows` rows along dim, the last of them 0."""
    if x.shape[dim] == rows:
        return x.contiguous()
    found = x.new_zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :]))
    found.narrow(dim, 0, x.shape[dim]).copy_(x)
    return found


@lru_cache(maxsize=16)  # a copy to a GPU makes the host wait for it
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
        self.merges = merges(job.problem, self.rows, [self.keys])

    def _groups(self, k: Tensor, is_backward: bool) -> list[tuple[Heads, slice, slice]]:
        """Heads that are gathered together, with their places in q and in k."""
        own = self.job.heads
        per_kv = (own.q[1] - own.q[0]) // k.shape[1]
        found, at = [], 0
        for count in groups_of(self.job.transport.size, k, is_backward):
            of_q = slice(at * per_kv, (at + count) * per_kv)
            of_all = (own.q[0] + of_q.start, own.q[0] + of_q.stop)
            kv = (own.kv[0] + at, own.kv[0] + at + count)
            heads = Heads(of_all, kv, own.is_all and count == k.shape[1])
            found.append((heads, of_q, slice(at, at + count)))
            at += count
        return found

    def _start(self, tensors: Sequence[Tensor]) -> list[Pending]:
        rows = self.job.shards.most_rows
        moved = [padded(x.permute(2, 0, 1, 3), rows, 0) for x in tensors]
        return [self.job.transport.gather(x) for x in moved]

    def _all(self, pending: Sequence[Pending]) -> list[Tensor]:
        """Keys in the order of the sequence, (batch, head, row, dim)."""
        found = [x.wait().flatten(0, 1).permute(1, 2, 0, 3) for x in pending]
        return [x.index_select(2, self.order) for x in found]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        job, sinks = self.job, self.job.problem.sinks
        result = Result(q, v.shape[-1], self.merges)
        groups = self._groups(k, False)
        waiting = self._start([x[:, groups[0][2]] for x in (k, v)])
        for index, (heads, of_q, _) in enumerate(groups):
            all_k, all_v = self._all(waiting)
            if index + 1 < len(groups):
                waiting = self._start([x[:, groups[index + 1][2]] for x in (k, v)])
            part = result.of_heads(of_q)
            part.attend(job.problem, heads, q[:, of_q], all_k, all_v, self.rows, self.keys)
            part.end()
        o = result.finished(None if sinks is None else job.heads.of(sinks))
        return o, Saved(o, result.stats)

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        groups = self._groups(k, True)
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
        moved = x.permute(2, 0, 1, 3)
        found = x.new_zeros((size * rows, *moved.shape[1:])).index_copy_(0, self.order, moved)
        return self.job.transport.exchange(found.unflatten(0, (size, rows)))

    def _received(self, column: Sequence[Pending]) -> Tensor:
        """The sum over ranks, in their order, of all groups of heads."""
        rows = self.job.shards.rows(self.job.rank)
        found = [x.wait().sum(0)[:rows].permute(1, 2, 0, 3) for x in column]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


# Bytes of k of a rank from which on a small group of heads goes first, and behind which the rest
# travels, and one returns last: below them another call costs more than what is hidden.
_LEAST = 16 << 20


def groups_of(size: int, k: Tensor, is_backward: bool) -> tuple[int, ...]:
    """How many key/value heads are gathered at a time."""
    heads = k.shape[1]
    if size == 1 or heads < 4 or k.numel() * k.element_size() < _LEAST:
        return (heads,)
    return (1, heads - 2, 1) if is_backward else (1, heads - 1)


class Ring:
    """Keys from rank to rank."""

    name = "ring"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows = job.rows_of(job.rank)
        self.steps = ring_steps(job.problem, job.shards)
        self.every = [self._source(step) for step in range(self.steps)]
        self.merges = self.steps > 1 or merges(job.problem, self.rows, self.every)

    def _source(self, step: int) -> Side:
        size = self.job.transport.size
        return self.job.keys_of((self.job.rank - step) % size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        job, sinks = self.job, self.job.problem.sinks
        result = Result(q, v.shape[-1], self.merges)
        here = [padded(x, job.shards.most_rows, 2) for x in (k, v)]
        for step, keys in enumerate(self.every):
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            own_k, own_v = (x[:, :, : keys.rows] for x in here)
            result.attend(job.problem, job.heads, q, own_k, own_v, self.rows, keys)
            here = here if arriving is None else arriving.wait()
        result.end()
        o = result.finished(None if sinks is None else job.heads.of(sinks))
        return o, Saved(o, result.stats)

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        here = [padded(x, job.shards.most_rows, 2) for x in (k, v)]
        following: Pending | None = None  # gradients of the keys of the next step, so far
        for step, keys in enumerate(self.every):
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            grads = [torch.zeros_like(x, dtype=sums_of(x.dtype)) for x in here]
            own = (x[:, :, : keys.rows] for x in (*here, *grads))
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
        return grads[0][:, :, :rows].to(k.dtype), grads[1][:, :, :rows].to(v.dtype)


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
