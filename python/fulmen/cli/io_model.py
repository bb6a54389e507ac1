# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between global memory and the multiprocessors by the IO model of the papers.

Exact attention with a small fast memory: FlashAttention (arXiv:2205.14135, section 3.2, algorithms
0, 1 and 3), its backward pass by tiles as in FlashAttention-2 (arXiv:2307.08691, algorithm 2). The
naive way writes matrices of all pairs and reads them back. Numbers of such matrices, of row
statistics and of dQ, which is added up in global memory, are float32.
"""

from __future__ import annotations

from typing import NamedTuple

FLOAT_BYTES = 4
FORWARD_PASSES = 4  # S and P, each written and read
BACKWARD_PASSES = 7  # P read twice; dP written and read; dS written, and read twice


class Call(NamedTuple):
    """What the model knows of a call."""

    q_rows: int
    kv_rows: int
    heads: int  # of q, of all batch entries
    kv_heads: int
    dim: int
    dim_v: int
    size: int  # bytes of a number
    pairs: int  # visible ones
    causal: bool

    @property
    def row_bytes(self) -> int:
        """Of q and o, or of k and v: one row of one head."""
        return self.size * (self.dim + self.dim_v)


def naive(call: Call, operation: str) -> int:
    """The way that writes matrices of all pairs.

    Args:
        call: the problem.
        operation: "forward" or "backward".

    Returns:
        Bytes.
    """
    rows = call.heads * call.q_rows + call.kv_heads * call.kv_rows
    if operation == "forward":
        return call.row_bytes * rows + FORWARD_PASSES * FLOAT_BYTES * call.pairs
    # dO twice, Q, dQ; K, V, dK, dV
    return 2 * call.row_bytes * rows + BACKWARD_PASSES * FLOAT_BYTES * call.pairs


def tiled(call: Call, operation: str, rows: int, columns: int) -> int:
    """The way by tiles.

    Args:
        call: the problem.
        operation: "forward" or "backward".
        rows: queries of a tile.
        columns: keys of a tile.

    Returns:
        Bytes.
    """
    if operation == "forward":
        seen = sum(_keys_seen(call, first + rows, columns) for first in range(0, call.q_rows, rows))
        return call.heads * call.row_bytes * (call.q_rows + seen)
    # For each tile of keys Q, dO, two statistics, and dQ read and written again; K, V, dK, dV once.
    seen = sum(_queries_seen(call, first, rows) for first in range(0, call.kv_rows, columns))
    by_tile = call.row_bytes + 2 * FLOAT_BYTES + 2 * FLOAT_BYTES * call.dim
    # Before that the sums of dO * O.
    sums = call.q_rows * (2 * call.size * call.dim_v + FLOAT_BYTES)
    return call.heads * (by_tile * seen + 2 * call.row_bytes * call.kv_rows + sums)


def _keys_seen(call: Call, end: int, columns: int) -> int:
    """Keys that a tile of queries reads which ends before row `end`, in whole tiles of columns."""
    if not call.causal:
        return call.kv_rows
    visible = min(call.kv_rows, max(min(end, call.q_rows) + call.kv_rows - call.q_rows, 0))
    return min(-(-visible // columns) * columns, call.kv_rows)


def _queries_seen(call: Call, first: int, rows: int) -> int:
    """Queries that a tile of keys reads which begins at key `first`, in whole tiles of rows."""
    if not call.causal:
        return call.q_rows
    hidden = min(max(first - (call.kv_rows - call.q_rows), 0), call.q_rows)
    return call.q_rows - hidden // rows * rows
