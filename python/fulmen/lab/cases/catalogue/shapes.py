# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Shapes: head dimensions, their pairs, and how many heads share a key/value head.

Every dimension of real models and the odd ones between, 0 for q and k, and (576, 512), the absorbed
shape of multi-head latent attention, which is above the 512 of the general rule.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case

DIMS = (1, 2, 3, 7, 8, 16, 31, 40, 64, 72, 80, 96, 128, 160, 192, 256, 320, 512)
CROSSED = (1, 3, 8, 40, 64, 128, 256, 512)
PAIRS = ((192, 128), (576, 512), (64, 256), (0, 1), (0, 16))
RATIOS = (1, 2, 3, 6, 7, 8, 12, 71)


def dims() -> list[Case]:
    """Each dimension in each type."""
    return [
        Case(
            f"dim{dim}_{dtype}",
            ("head_dim",),
            q_rows=19,
            kv_rows=23,
            dim=dim,
            causal=n % 2 == 1,
            dtype=dtype,
        )
        for n, dim in enumerate(DIMS)
        for dtype in DTYPES
    ]


def crossed() -> list[Case]:
    """Two different dimensions, the types one after the other."""
    pairs = [(a, b) for a in CROSSED for b in CROSSED if a != b]
    return [
        Case(
            f"dim{a}_v{b}_{DTYPES[n % 4]}",
            ("head_dim",),
            q_rows=17,
            kv_rows=13,
            heads=1,
            dim=a,
            dim_v=b,
            causal=n % 3 == 0,
            dtype=DTYPES[n % 4],
        )
        for n, (a, b) in enumerate(pairs)
    ]


def pairs() -> list[Case]:
    """The pairs with a name, each in each type, full and causal."""
    return [
        Case(
            f"pair{a}_{b}_{dtype}{'_causal' if causal else ''}",
            ("head_dim",),
            q_rows=18,
            kv_rows=33,
            heads=2,
            kv_heads=1,
            dim=a,
            dim_v=b,
            causal=causal,
            dtype=dtype,
        )
        for a, b in PAIRS
        for dtype in DTYPES
        for causal in (False, True)
    ]


def groups() -> list[Case]:
    """Each ratio of heads to kv_heads, one group and two, full and causal."""
    return [
        Case(
            f"gqa{ratio}_kv{kv_heads}_{dtype}{'_causal' if causal else ''}",
            ("gqa",),
            batch=2 if ratio < 8 else 1,
            heads=ratio * kv_heads,
            kv_heads=kv_heads,
            q_rows=9,
            kv_rows=17,
            dim=8,
            causal=causal,
            dtype=dtype,
        )
        for n, ratio in enumerate(RATIOS)
        for m, kv_heads in enumerate((1, 1, 2))
        for dtype in (DTYPES[(n + m) % 4],)
        if ratio * kv_heads < 100
        for causal in (False, True)
    ]


def empty() -> list[Case]:
    """No rows, no keys, no batch, no heads: legal, and nothing is computed."""
    table: dict[str, dict[str, Any]] = {
        "no_q": {"q_rows": 0, "kv_rows": 5},
        "no_keys": {"q_rows": 5, "kv_rows": 0},
        "no_rows": {"q_rows": 0, "kv_rows": 0},
        "no_batch": {"batch": 0},
        "no_keys_causal": {"q_rows": 5, "kv_rows": 0, "causal": True},
        "no_keys_sinks": {"q_rows": 5, "kv_rows": 0, "sinks": "normal"},
        "no_keys_bias": {"q_rows": 5, "kv_rows": 0, "bias": "1h11"},
        "no_q_bias": {"q_rows": 0, "kv_rows": 5, "bias": "1h1k"},
    }
    return [
        Case(f"{name}_{dtype}", ("empty",), dtype=dtype, **fields)
        for name, fields in table.items()
        for dtype in DTYPES
    ]


CASES = dims() + crossed() + pairs() + groups() + empty()
