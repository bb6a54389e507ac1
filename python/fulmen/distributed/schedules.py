# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Schedules: in which order the keys of all ranks come to each, and their gradients go back.

gather  every rank gets all keys, then calls once for each of its segments: nothing is merged.
ring    keys go from rank to rank; each rank has two sets at a time, one that it computes with and
        one that arrives. Gradients of keys follow one step behind (Liu et al., Ring Attention,
        2023). It ends with the step behind which no rank sees anything.

All ranks send as many rows as the one with most has.
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

    @property
    def sinks(self) -> Tensor | None:
        """Those of the heads."""
        sinks = self.problem.sinks
        return None if sinks is None else self.heads.of(sinks)


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

    def _all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Keys of all ranks in the order of the sequence, (batch, head, row, dim)."""
        rows = self.job.shards.most_rows
        moved = [padded(x.permute(2, 0, 1, 3), rows, 0) for x in tensors]
        pending = [self.job.transport.gather(x) for x in moved]
        found = [x.wait().flatten(0, 1).permute(1, 2, 0, 3) for x in pending]
        return [x.index_select(2, self.order) for x in found]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o, and m and l of its rows."""
        job = self.job
        result = Result(q, v.shape[-1], self.merges)
        all_k, all_v = self._all((k, v))
        result.attend(job.problem, job.heads, q, all_k, all_v, self.rows, self.keys)
        return result.finished(job.sinks), result.stats

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        all_k, all_v = self._all((k, v))
        dk, dv = (x.new_zeros(x.shape, dtype=sums_of(x.dtype)) for x in (all_k, all_v))
        sums.attend(job.problem, job.heads, given, all_k, all_v, self.rows, self.keys, dk, dv)
        pending = [self._home(x) for x in (dk, dv)]
        own_dk, own_dv = (self._summed(x) for x in pending)
        return own_dk.to(k.dtype), own_dv.to(v.dtype)

    def _home(self, x: Tensor) -> Pending:
        """Gradients of all keys to the ranks that have them."""
        size, rows = self.job.transport.size, self.job.shards.most_rows
        moved = x.permute(2, 0, 1, 3)
        found = x.new_zeros((size * rows, *moved.shape[1:])).index_copy_(0, self.order, moved)
        return self.job.transport.exchange(found.unflatten(0, (size, rows)))

    def _summed(self, pending: Pending) -> Tensor:
        """The sum over ranks, in their order."""
        rows = self.job.shards.rows(self.job.rank)
        found: Tensor = pending.wait().sum(0)[:rows].permute(1, 2, 0, 3)
        return found


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o, and m and l of its rows."""
        job = self.job
        result = Result(q, v.shape[-1], self.merges)
        here = [padded(x, job.shards.most_rows, 2) for x in (k, v)]
        for step, keys in enumerate(self.every):
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            own_k, own_v = (x[:, :, : keys.rows] for x in here)
            result.attend(job.problem, job.heads, q, own_k, own_v, self.rows, keys)
            here = here if arriving is None else arriving.wait()
        return result.finished(job.sinks), result.stats

    def backward(self, given: Incoming, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        job = self.job
        here = [padded(x, job.shards.most_rows, 2) for x in (k, v)]
        following: Pending | None = None  # gradients of the keys of the next step, so far
        for step, keys in enumerate(self.every):
            arriving = job.transport.shift(here, 1) if step + 1 < self.steps else None
            grads = [torch.zeros_like(x, dtype=sums_of(x.dtype)) for x in here]
            own = (x[:, :, : keys.rows] for x in (*here, *grads))
            own_k, own_v, dk, dv = own
            sums.attend(job.problem, job.heads, given, own_k, own_v, self.rows, keys, dk, dv)
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
