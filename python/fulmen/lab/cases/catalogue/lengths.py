# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lengths: every residue around every tile size, in queries and in keys.

Tiles are 16, 32, 64 or 128 rows or columns in one backend or another; the cases do not know which.
Edges are the lengths one below, at and one above each; sweeps pass through every residue modulo
128 in q_rows and in kv_rows at once; decode rows have one query and every number of keys.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case

EDGES = tuple(t + d for t in (16, 32, 64, 128) for d in (-1, 0, 1))
RESIDUES = 129  # 0 .. 128
STEP = 50  # has no factor in common with RESIDUES: n * STEP takes every length


def dtype(n: int) -> str:
    """The types one after the other."""
    return DTYPES[n % len(DTYPES)]


def edges() -> list[Case]:
    """Every pair of edges, causal every other time."""
    return [
        Case(
            f"edge_q{q}_k{k}",
            ("lengths",),
            q_rows=q,
            kv_rows=k,
            heads=1,
            dim=8,
            causal=(a + b) % 2 == 1,
            dtype=dtype(a + 2 * b),
        )
        for a, q in enumerate(EDGES)
        for b, k in enumerate(EDGES)
    ]


def sweeps() -> list[Case]:
    """Every length from 0 to 128 in q_rows, each with another one in kv_rows."""
    found = []
    kinds: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (9, 5)},
    }
    for index, (kind, options) in enumerate(kinds.items()):
        for n in range(RESIDUES):
            q, k = n, (n * STEP + 7 * index) % RESIDUES
            found.append(
                Case(
                    f"sweep_{kind}_q{q}_k{k}",
                    ("lengths",),
                    q_rows=q,
                    kv_rows=k,
                    heads=1,
                    dim=4,
                    dim_v=5,
                    dtype=dtype(n + index),
                    **options,
                )
            )
    return found


def far_from_zero() -> list[Case]:
    """Scores near -100 or -2e5 at every length of one tile: padded keys must not look large."""
    return [
        Case(
            f"opposed_s{n}",
            ("lengths", "numerics"),
            "a padded key with score 0 would drown every real one",
            q_rows=n,
            heads=1,
            dim=8,
            inputs="opposed_100" if n % 2 else "opposed_2e5",
            dtype=dtype(n // 2),
        )
        for n in range(65, 129)
    ]


def decode() -> list[Case]:
    """One query, or two, against every number of keys; forward only."""
    return [
        Case(
            f"decode_k{k}",
            ("lengths", "decode"),
            q_rows=1 + k % 2,
            kv_rows=k,
            heads=4,
            kv_heads=2,
            dim=8,
            causal=True,
            gradients=(),
            dtype=dtype(k),
        )
        for k in range(1, 130)
    ]


CASES = edges() + sweeps() + far_from_zero() + decode()
