# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The truth in float64 for one head of a cell: what every side's error is measured against.

One head of one sequence is computed whole, in float64, by NumPy or, on a GPU, by torch; of the
results a sample of rows is compared. Quadratic in time for that one head, and for the heads that
share its keys.
"""

from __future__ import annotations

import random
from typing import Any

from .cells import BLOCK_ROWS, SAMPLED_ROWS, WINDOW, Cell
from .sides import Tensors


class Truth:
    """Results of one (sequence, head) in float64."""

    def __init__(self, cell: Cell, tensors: Tensors, xp: Any) -> None:
        """Computed with xp, which is numpy or torch."""
        self.xp = xp
        choose = random.Random(cell.name)
        sequence, head = choose.randrange(len(cell.lengths)), choose.randrange(cell.heads)
        group = cell.heads // cell.kv_heads
        kv_head = head // group
        rows = cell.lengths[sequence]
        self.rows = sorted(choose.sample(range(rows), min(SAMPLED_ROWS, rows)))
        begin = sum(cell.lengths[:sequence]) if cell.is_joined else 0
        self.batch = 0 if cell.is_joined else sequence
        self.span = slice(begin, begin + rows)
        self.heads = (head,) if cell.op == "forward" else (head, kv_head, kv_head)
        k, v = (self._one(x, kv_head) for x in (tensors.k, tensors.v))

        def results(head: int) -> tuple[Any, ...]:
            q, do = (self._one(x, head) for x in (tensors.q, tensors.do))
            return self._computed(cell, q, k, v, do)

        self.results = results(head)
        if cell.op == "backward":  # dk and dv are sums over the heads that share the keys
            for other in range(kv_head * group, (kv_head + 1) * group):
                if other != head:
                    _, dk, dv = results(other)
                    self.results = (self.results[0], self.results[1] + dk, self.results[2] + dv)

    def _one(self, x: Any, head: int) -> Any:
        one = x[self.batch, head, self.span]
        return one.double() if self.xp.__name__ == "torch" else one.astype("float64")

    def _computed(self, cell: Cell, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        """O; or dq, dk, dv: block by block of rows, so that no S x S matrix lies in memory."""
        xp, scale = self.xp, cell.dim**-0.5
        o, dq = xp.zeros_like(q), xp.zeros_like(q)
        dk, dv = xp.zeros_like(k), xp.zeros_like(v)
        rows = q.shape[0]
        for first in range(0, rows, BLOCK_ROWS):
            at = slice(first, min(first + BLOCK_ROWS, rows))
            s = scale * (q[at] @ k.T)
            if cell.causal:
                s = s + _hidden(xp, at, s, WINDOW if cell.option == "window" else rows)
            p = xp.exp(s - xp.amax(s, -1)[:, None])
            p = p / p.sum(-1)[:, None]
            o[at] = p @ v
            if cell.op == "forward":
                continue
            dp = do[at] @ v.T
            ds = p * (dp - (do[at] * o[at]).sum(-1)[:, None])
            dq[at] = scale * (ds @ k)
            dk += scale * (ds.T @ q[at])
            dv += p.T @ do[at]
        return (o,) if cell.op == "forward" else (dq, dk, dv)

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest |x - truth| over the sampled rows; NaN where a result is not finite."""
        largest = 0.0
        for x, truth, head in zip(got, self.results, self.heads):
            one = self._one(x, head)[self.rows]
            error = float(abs(one - truth[self.rows]).max())
            largest = error if error != error else max(largest, error)
            if error != error:
                break
        return largest


def _hidden(xp: Any, at: slice, s: Any, window: int) -> Any:
    """0 where i - window <= key j <= row i, -inf elsewhere."""
    where = {"device": s.device} if xp.__name__ == "torch" else {}
    i = xp.arange(at.start, at.stop, **where)[:, None]
    j = xp.arange(s.shape[1], **where)[None, :]
    return xp.where((j <= i) & (j >= i - window), 0.0, -float("inf"))
