# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The closed forms of the IO model against loops that move one tile after the other."""

from __future__ import annotations

import pytest

from fulmen.cli import io_model

ROWS, COLUMNS = 16, 24


def call(causal: bool, q_rows: int, kv_rows: int) -> io_model.Call:
    pairs = sum(
        not causal or j - (kv_rows - q_rows) <= i for i in range(q_rows) for j in range(kv_rows)
    )
    return io_model.Call(
        q_rows=q_rows, kv_rows=kv_rows, heads=6, kv_heads=2, dim=8, dim_v=5, size=2, pairs=pairs,
        causal=causal,
    )  # fmt: skip


def meets(c: io_model.Call, first_row: int, first_key: int) -> bool:
    """Whether a tile has a visible pair: its last query sees its first key."""
    last = min(first_row + ROWS, c.q_rows) - 1
    return not c.causal or first_key - (c.kv_rows - c.q_rows) <= last


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(40, 70), (70, 40), (33, 33), (5, 0)])
def test_tiles(causal: bool, q_rows: int, kv_rows: int) -> None:
    c = call(causal, q_rows, kv_rows)
    tiles = [
        (min(ROWS, q_rows - i), min(COLUMNS, kv_rows - j))
        for i in range(0, q_rows, ROWS)
        for j in range(0, kv_rows, COLUMNS)
        if meets(c, i, j)
    ]
    width = c.dim + c.dim_v
    forward = c.heads * (q_rows * width * 2 + sum(keys for _, keys in tiles) * width * 2)
    assert io_model.tiled(c, "forward", ROWS, COLUMNS) == forward
    moved = sum(rows * (width * 2 + 2 * 4 + 2 * 4 * c.dim) for rows, _ in tiles)
    once = 2 * width * 2 * kv_rows + q_rows * (2 * c.dim_v * 2 + 4)
    assert io_model.tiled(c, "backward", ROWS, COLUMNS) == c.heads * (moved + once)


def test_naive() -> None:
    c = call(False, 40, 70)
    rows = 6 * 40 + 2 * 70
    assert io_model.naive(c, "forward") == 2 * 13 * rows + 4 * 4 * c.pairs
    assert io_model.naive(c, "backward") == 2 * 2 * 13 * rows + 7 * 4 * c.pairs
