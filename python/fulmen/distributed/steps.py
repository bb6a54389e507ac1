# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The calls of a rank on the keys that it has at a time, and the sums of what they give.

Partial results over disjoint keys, each with the maximum m and the sum l of its row, merge by

    M = max(m, m')    L = l exp(m - M) + l' exp(m' - M)    O = o + (o' - o) l' exp(m' - M) / L

(Milakov and Gimelshein, 2018; Dao et al., 2022, 3.1), in the kernel that computes o' where it can.
m and l stay apart, so that scores may be large; sinks enter once, at the end. Gradients are sums
over parts, in float32 at least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import fulmen

from .parts import Heads, gaps, overlap

if TYPE_CHECKING:
    from .problem import Problem, Side


def sums_of(dtype: torch.dtype) -> torch.dtype:
    """The type of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Result:
    """o and the statistics of the rows of a rank, (batch, head, row, ...)."""

    def __init__(self, q: Tensor, dim_v: int, merges: bool) -> None:
        """merges: a row may get several parts; else the only one is written where it belongs."""
        self.dtype, self.merges = q.dtype, merges
        sums = sums_of(q.dtype)
        shape = q.shape[:-1]
        self.o = q.new_empty((*shape, dim_v), dtype=sums if merges else q.dtype)
        self.stats = q.new_empty((*shape, 2), dtype=sums)
        self._begun: list[tuple[int, int]] = []  # rows that have a part

    def attend(
        self, problem: Problem, heads: Heads, q: Tensor, k: Tensor, v: Tensor,
        rows: Side, keys: Side,
    ) -> None:  # fmt: skip
        """Merges the attention of the rows to keys that are here."""
        for part in problem.parts(rows, keys):
            options: Any = problem.options(part, rows, keys, heads)
            if problem.sinks is not None and not self.merges:
                options["sinks"] = heads.of(problem.sinks)
            at, of_keys = slice(*part.rows), slice(*part.keys)
            own = q[:, :, at], k[:, :, of_keys], v[:, :, of_keys]
            o, stats = self.o[:, :, at], self.stats[:, :, at]
            if not any(a < part.rows[1] and part.rows[0] < b for a, b in self._begun):
                stats.copy_(fulmen.attention_forward(*own, out=o, **options).stats)
            elif _joins_in_place(q, self.o.shape[-1]):
                self._clear(*part.rows)
                before = fulmen.Forward(o, None, stats)
                fulmen.attention_forward(*own, accumulate=before, **options)
            else:
                self._clear(*part.rows)
                found = fulmen.attention_forward(*own, out_dtype=o.dtype, **options)
                _merge(o, stats, found.o, found.stats)
            self._begun.append(part.rows)

    def _clear(self, begin: int, end: int) -> None:
        """Makes rows that have no part yet rows that saw no key."""
        for a, b in gaps(self._begun, begin, end):
            self.o[:, :, a:b] = 0.0
            self.stats[:, :, a:b, 0] = -torch.inf
            self.stats[:, :, a:b, 1] = 0.0

    def finished(self, sinks: Tensor | None) -> Tensor:
        """o in the type of q, with the sinks, when no part comes any more."""
        self._clear(0, self.o.shape[2])
        if not self.merges:
            return self.o
        if sinks is not None:
            self.o *= torch.sigmoid(self.lse - sinks.to(self.stats.dtype)[:, None]).unsqueeze(-1)
        return self.o.to(self.dtype)

    @property
    def lse(self) -> Tensor:
        """The natural logarithm of the row sums, without sinks."""
        return self.stats[..., 0] + self.stats[..., 1].log()


def _joins_in_place(q: Tensor, dim_v: int) -> bool:
    """Whether the fastest kernels that there are merge what they compute: Hopper's, and the CPU."""
    if not q.is_cuda:
        return True
    is_hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    return bool(is_hopper and q.element_size() == 2 and max(q.shape[-1], dim_v) <= 256)


def _merge(o: Tensor, stats: Tensor, part_o: Tensor, part_stats: Tensor) -> None:
    """Adds a part to o and stats, in place."""
    top = torch.maximum(stats[..., 0], part_stats[..., 0])
    level = top.masked_fill(top == -torch.inf, 0.0)  # no key yet
    own, other = (x[..., 1] * torch.exp(x[..., 0] - level) for x in (stats, part_stats))
    total = own + other
    share = torch.where(other == 0, other, other / total)
    o.lerp_(part_o, share.unsqueeze(-1))
    stats[..., 0], stats[..., 1] = top, total


class Saved(NamedTuple):
    """Of a forward pass, for its backward pass: as the rank computes, by rows or by heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    stats: Tensor


class Gradients(NamedTuple):
    """Of a rank's rows; of captures the sums by name."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    captures: dict[str, Tensor]

    def of_capture(self, name: str, x: Tensor) -> Tensor:
        """That of the array x of this name: 0 where no pair read it."""
        return self.captures[name].to(x.dtype) if name in self.captures else torch.zeros_like(x)


class Incoming(NamedTuple):
    """What the backward pass of a rank begins with."""

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    stats: Tensor
    q: Tensor


class Sums:
    """The gradients that a rank adds up: of its q, and of what texts read."""

    def __init__(self, q: Tensor, captures: tuple[str, ...], merges: bool) -> None:
        """merges: a row may get several parts; else the only one is rounded once, by its call."""
        dtype = sums_of(q.dtype) if merges else q.dtype
        self.merges = merges
        make = torch.zeros_like if merges else torch.empty_like
        self.dq = make(q, dtype=dtype, memory_format=torch.contiguous_format)
        self.wanted = captures
        self.captures: dict[str, Tensor] = {}

    def attend(
        self, problem: Problem, heads: Heads, given: Incoming, k: Tensor, v: Tensor,
        rows: Side, keys: Side, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Adds what the keys that are here give, to dk and dv too."""
        dq = self.dq
        parts = problem.parts(rows, keys)
        if not self.merges:  # the only step: all parts of these rows are here
            for a, b in gaps([part.rows for part in parts], 0, dq.shape[2]):
                dq[:, :, a:b] = 0.0
        for part in parts:
            options: Any = problem.options(part, rows, keys, heads)
            if problem.sinks is not None:
                options["sinks"] = heads.of(problem.sinks)
            at, of_keys = slice(*part.rows), slice(*part.keys)
            options["need"] = ("q", "k", "v", *self.wanted)
            options["dlse"] = None if given.dlse is None else given.dlse[:, :, at]
            if self.merges:
                options["accumulate"] = fulmen.Gradients(
                    dq[:, :, at], dk[:, :, of_keys], dv[:, :, of_keys]
                )
            found = fulmen.attention_backward(
                given.do[:, :, at], given.q[:, :, at], k[:, :, of_keys], v[:, :, of_keys],
                given.o[:, :, at], given.stats[:, :, at], **options,
            )  # fmt: skip
            if not self.merges:
                dq[:, :, at] = found.dq
                dk[:, :, of_keys] += found.dk
                dv[:, :, of_keys] += found.dv
            for name, x in (found.dcaptures or {}).items():
                if name in self.wanted:
                    wide = x.to(sums_of(x.dtype))
                    self.captures[name] = self.captures[name] + wide if (
                        name in self.captures) else wide  # fmt: skip


def sink_gradient(sinks: Tensor, do: Tensor, o: Tensor, stats: Tensor) -> Tensor:
    """- sum over rows of p_sink do . o, p_sink = exp(sink) / (l + exp(sink)) with l of the keys."""
    lse = stats[..., 0] + stats[..., 1].log()
    share = torch.sigmoid(sinks.to(stats.dtype)[:, None] - lse)
    along = (do.to(stats.dtype) * o.to(stats.dtype)).sum(-1)
    return -(share * along).sum((0, 2)).to(sinks.dtype)


def merges(problem: Problem, rows: Side, every: list[Side]) -> bool:
    """Whether a row of the rank gets more than one part from the keys of all steps."""
    spans = []
    for keys in every:
        spans += problem.parts(rows, keys)
    return overlap(spans)
