# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences and partial results: offsets of every shape, and merges over disjoint keys.

Zero lengths stand first, last, alternately and everywhere; rows may follow the last sequence.
Merges split the keys of one problem, also into parts that are empty or wholly hidden.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ..arrays import DTYPES
from ..case import Case
from .options import ALL_SCORE_OPTIONS, Fields, table

LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((9,), (13,)),
    "equal": ((7, 7, 7), (7, 7, 7)),
    "mixed": ((1, 40, 3, 17), (33, 2, 65, 17)),
    "zero_first": ((0, 0, 5, 6), (0, 4, 8, 2)),
    "zero_last": ((5, 6, 0, 0), (8, 2, 4, 0)),
    "alternate": ((0, 5, 0, 6, 0), (3, 0, 4, 7, 0)),
    "all_zero": ((0, 0, 0), (0, 0, 0)),
    "no_keys": ((4, 5), (0, 0)),
    "no_queries": ((0, 0), (4, 5)),
    "total_below_batch": ((0, 0, 0, 1), (0, 0, 0, 1)),
    "decode": ((1, 1, 1, 1), (5, 70, 1, 31)),
    "tiles": ((64, 16, 65), (128, 15, 63)),
}

SPLITS: dict[str, tuple[int, ...]] = {
    "one": (64,),
    "halves": (32, 32),
    "uneven": (61, 3),
    "empty_first": (0, 64),
    "empty_last": (64, 0),
    "eight": (8,) * 8,
    "singles": (1,) * 20 + (44,),
}


def sequences() -> list[Case]:
    """Every set of lengths, plain and causal with a tail, both offset types."""
    rows: dict[str, Fields] = {}
    for n, (name, (q, k)) in enumerate(LENGTHS.items()):
        shape: Fields = {"q_packed": q, "kv_packed": k}
        for m, dtype in enumerate(DTYPES):
            rows[f"{name}_{dtype}"] = {
                **shape,
                "dtype": dtype,
                "offsets": ("int32", "int64")[(n + m) % 2],
                "max_rows": (n + m) % 3 and 1 + 50 * ((n + m) % 3 - 1),
                "need_each": m == 0,
            }
        rows[f"{name}_causal_tail"] = {
            **shape,
            "causal": True,
            "q_tail": 3,
            "kv_tail": 5,
            "poison": "nan_hidden",
            "out": "contiguous",
            "dlse": True,
        }
        rows[f"{name}_options"] = {
            **shape,
            "heads": 6,
            "kv_heads": 2,
            "window": (6, 0),
            "causal": True,
            "alignment": "top_left" if n % 2 else "bottom_right",
            **ALL_SCORE_OPTIONS,
            "masks": (("chunks", 9),),
        }
        rows[f"{name}_bias_mask"] = {
            **shape,
            "bias": ("hqk", "1k", "h1k", "qk")[n % 4],
            "masks": (("bool", ("qk", "h1k", "hqk")[n % 3], 0.7), ("documents", 2)),
            "need_each": True,
        }
    return table("packed", ("packed",), rows)


def merges() -> list[Case]:
    """Every split, in each type; sinks enter in the merge."""
    rows: dict[str, Fields] = {}
    for (name, parts), dtype in product(SPLITS.items(), DTYPES):
        fields: Fields = {"dtype": dtype, "parts": parts}
        rows[f"{name}_{dtype}"] = fields
        rows[f"{name}_sinks_{dtype}"] = {
            **fields,
            "sinks": "normal",
            "masks": (("bool", "b11k", 0.4),),
        }
    for dtype in ("float16", "bfloat16"):
        rows[f"eight_float32_parts_{dtype}"] = {
            "dtype": dtype,
            "parts": (8,) * 8,
            "out_dtype": "float32",
        }
    hidden: dict[str, Any] = {"masks": (("bool", "11qk", "top_left_half"),)}
    rows["one_side_hidden"] = {**hidden, "parts": (32, 32)}
    rows["both_sides_hidden"] = {"masks": (("bool", "11qk", "nothing"),), "parts": (32, 32)}
    common: Fields = {"check": "merge", "gradients": (), "batch": 2, "heads": 3}
    return table("merge", ("merge", "lse"), rows, **common, q_rows=5, kv_rows=64)


CASES = sequences() + merges()
