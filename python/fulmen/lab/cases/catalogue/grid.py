# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid: every two values of every two options meet in some case.

The table of factors is below; pairwise.pairwise chooses the rows. Several seeds give several
independent grids, so most triples meet as well.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case
from ..pairwise import Row, pairwise
from .options import MASKS, NEED_CAUSAL, SCORE_OPTIONS

SEEDS = range(6)

FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "rows": ((1, 33), (17, 17), (33, 20), (40, 70), (5, 0)),
    "heads": ((1, 1), (2, 2), (6, 2), (7, 1)),
    "dims": ((8, 8), (16, 5), (3, 24), (40, 40)),
    "order": ("full", "causal", "causal top_left", "top_left"),
    "window": (None, (6, 0), (2, 9), (-1, 0)),
    "mask": tuple(MASKS),
    "bias": ("", "1h1k", "b1qk float32", "bhq1 same", "11qk same hides"),
    **SCORE_OPTIONS,
    "dropout_p": (0.0, 0.25),
    "dlse": (False, True),
    "lengths": ("", "lengths", "packed"),
    "views": ("contiguous", "rows_first", "gapped", "stepped", "offset_1"),
    "inputs": ("normal", "outlier", "wide", "opposed_100"),
    "poison": ("", "nan_hidden"),
}


def allowed(row: Row) -> bool:
    """Which combinations mean something: see semantics, Masks."""
    causal = row["order"].startswith("causal")
    looks_ahead = row["window"] is not None and row["window"][1] > 0
    if causal and looks_ahead:
        return False
    if not causal and row["mask"] in NEED_CAUSAL:
        return False
    if row["lengths"] == "packed" and row["bias"].startswith("b"):  # no batch axis there
        return False
    return not (row["bias"].endswith("float32") and row["dtype"] == "float64")


def lengths_of(row: Row) -> dict[str, Any]:
    """Three batch entries: none, some or all of the rows, dense or packed."""
    q, k = row["rows"]
    if row["lengths"] == "lengths":
        return {"q_lengths": (q, q // 2, 1), "kv_lengths": (k // 3, k, 0)}
    if row["lengths"] == "packed":
        return {"q_packed": (q, 0, q // 2), "kv_packed": (k // 2, 3, k), "q_tail": 2}
    return {}


def case_of(row: Row, name: str) -> Case:
    """One row of the grid as a case."""
    q, k = row["rows"]
    shape: dict[str, Any] = {"batch": 3, "q_rows": q, "kv_rows": k} | lengths_of(row)
    taken = {name: row[name] for name in TAKEN}
    masks = MASKS[row["mask"]]
    if row["lengths"] == "packed":
        taken["bias"] = row["bias"][1:]  # no batch axis beside packed sequences
        masks = tuple((m[0], m[1][1:], *m[2:]) if m[0] == "bool" else m for m in masks)
    return Case(
        name,
        ("grid",),
        heads=row["heads"][0],
        kv_heads=row["heads"][1],
        dim=row["dims"][0],
        dim_v=row["dims"][1],
        causal=row["order"].startswith("causal"),
        alignment="top_left" if row["order"].endswith("top_left") else "bottom_right",
        masks=masks,
        rng=(20261128, 3),
        views=(("q k v do", row["views"]),) if row["views"] != "contiguous" else (),
        **shape,
        **taken,
    )


TAKEN = (
    "dtype", "window", "bias", *SCORE_OPTIONS, "dropout_p", "dlse", "inputs", "poison",
)  # fmt: skip

CASES = [
    case_of(row, f"grid{seed}_{n:02d}")
    for seed in SEEDS
    for n, row in enumerate(pairwise(FACTORS, allowed, seed))
]
