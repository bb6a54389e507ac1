# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The truth in float64 for one head of a cell: what every side's error is measured against.

One batch entry and head is computed whole, in float64, by NumPy or, on a GPU, by torch; of the
results a sample of rows is compared. Quadratic in memory for that one head.
"""

from __future__ import annotations

import random
from typing import Any

from .cells import Cell
from .sides import Tensors

SAMPLED_ROWS = 256
BLOCK_ROWS = 2048  # rows of scores in memory at once


class Truth:
    """Results of one (batch, head) in float64."""

    def __init__(self, cell: Cell, tensors: Tensors, xp: Any) -> None:
        """Computed with xp, which is numpy or torch."""
        self.xp = xp
        choose = random.Random(cell.name)
        self.batch, self.head = choose.randrange(cell.batch), choose.randrange(cell.heads)
        kv_head = self.head // (cell.heads // cell.kv_heads)
        self.rows = sorted(choose.sample(range(cell.rows), min(SAMPLED_ROWS, cell.rows)))
        q, do = (self._one(x, self.head) for x in (tensors.q, tensors.do))
        k, v = (self._one(x, kv_head) for x in (tensors.k, tensors.v))
        self.results = self._computed(cell, q, k, v, do)

    def _one(self, x: Any, head: int) -> Any:
        one = x[self.batch, head]
        return one.double() if self.xp.__name__ == "torch" else one.astype("float64")

    def _computed(self, cell: Cell, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        """O; or dq, dk, dv: block by block of rows, so that no S x S matrix lies in memory."""
        xp, scale = self.xp, cell.dim**-0.5
        o, dq = xp.zeros_like(q), xp.zeros_like(q)
        dk, dv = xp.zeros_like(k), xp.zeros_like(v)
        for first in range(0, cell.rows, BLOCK_ROWS):
            at = slice(first, min(first + BLOCK_ROWS, cell.rows))
            s = scale * (q[at] @ k.T)
            if cell.causal:
                s = s + _hidden(xp, at, s)
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
        for x, truth in zip(got, self.results):
            one = self._one(x, self.head)[self.rows]
            error = float(abs(one - truth[self.rows]).max())
            largest = error if error != error else max(largest, error)
            if error != error:
                break
        return largest


def _hidden(xp: Any, at: slice, s: Any) -> Any:
    """0 where key j <= row i, -inf elsewhere."""
    where = {"device": s.device} if xp.__name__ == "torch" else {}
    i = xp.arange(at.start, at.stop, **where)[:, None]
    j = xp.arange(s.shape[1], **where)[None, :]
    return xp.where(j <= i, 0.0, -float("inf"))
