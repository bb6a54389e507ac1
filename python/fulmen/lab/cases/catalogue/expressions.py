# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks that users write: each text over shapes, layouts of sequences and dtypes."""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case
from ..expressions import EXPRESSIONS
from .options import ALL_SCORE_OPTIONS

Fields = dict[str, Any]

SHAPES: dict[str, Fields] = {
    "square": {"q_rows": 37, "kv_rows": 37, "heads": 3},
    "chunk": {"q_rows": 9, "kv_rows": 70, "batch": 2, "heads": 4, "kv_heads": 2},
    "row": {"q_rows": 1, "kv_rows": 150, "heads": 4, "kv_heads": 1, "batch": 2},
}
# Of several blocks on tensor cores, rows and keys of which are no multiple of any.
TILES: Fields = {"q_rows": 141, "kv_rows": 203, "heads": 2, "kv_heads": 1, "dim": 64}
BACKWARD_TILES = ("relative", "temperature", "mixed", "documents", "both", "nan_where_hidden")
LENGTHS: dict[str, Fields] = {
    "padded": {
        "batch": 3, "q_rows": 12, "kv_rows": 40, "q_lengths": (12, 5, 0), "kv_lengths": (40, 17, 9),
    },
    "packed": {"q_packed": (5, 0, 20), "kv_packed": (9, 4, 33), "q_tail": 2, "kv_tail": 1},
    "pages": {
        "batch": 2, "q_rows": 3, "kv_rows": 50, "kv_lengths": (50, 33), "page_size": 16,
        "heads": 4, "kv_heads": 2, "gradients": (),
    },
}  # fmt: skip
# Of more keys than a tile, with lengths.
LONG: dict[str, Fields] = {
    "padded_tiles": {
        "batch": 2, "q_rows": 130, "kv_rows": 200, "q_lengths": (130, 70), "kv_lengths": (200, 137),
        "heads": 2, "kv_heads": 1, "dim": 64,
    },
    "packed_tiles": {
        "q_packed": (65, 140), "kv_packed": (70, 210), "heads": 2, "q_tail": 2, "kv_tail": 1,
        "dim": 64,
    },
}  # fmt: skip
# Masks alone over several tiles of rows and keys, some of which they show or hide whole.
WIDE: Fields = {"q_rows": 270, "kv_rows": 300, "kv_heads": 1}
BESIDE: dict[str, Fields] = {
    "bias": {"expression": "both", "bias": "1hqk", "masks": (("bool", "b11k", 0.8),)},
    "scores": {"expression": "relative", **ALL_SCORE_OPTIONS, "causal": True},
    "sinks": {"expression": "mixed", "sinks": "normal", "dlse": True},
    "dropout": {"expression": "alibi", "dropout_p": 0.25, "rng": (5, 6)},
    "window": {"expression": "dilated", "window": (20, 3), "bias": "qk"},
    "hidden": {"expression": "both", "poison": "nan_hidden"},
    "nan": {"expression": "both", "poison": "nan_k"},
}


def _cases() -> list[Case]:
    found = []
    for n, name in enumerate(EXPRESSIONS):
        for m, (shape, fields) in enumerate(SHAPES.items()):
            kind = DTYPES[(n + m) % 4]
            found.append(_case(f"{name}_{shape}", {**fields, "dtype": kind, "expression": name}))
        fields = {**TILES, "dtype": DTYPES[2 + n % 2], "expression": name}
        forward = {} if name in BACKWARD_TILES else {"gradients": ()}
        found.append(_case(f"{name}_tiles", {**fields, **forward}))
    for n, name in enumerate(("both", "documents", "temperature", "sinks_and_window")):
        for m, (shape, fields) in enumerate(LENGTHS.items()):
            kind = DTYPES[(n + m) % 4]
            found.append(_case(f"{name}_{shape}", {**fields, "dtype": kind, "expression": name}))
    for n, name in enumerate(("documents", "both")):
        for m, (shape, fields) in enumerate(LONG.items()):
            kind = DTYPES[2 + (n + m) % 2]
            found.append(_case(f"{name}_{shape}", {**fields, "dtype": kind, "expression": name}))
    for n, name in enumerate(("causal", "documents", "sinks_and_window", "nothing", "by_head")):
        for dim, kind in ((64, DTYPES[2 + n % 2]), (128, DTYPES[3 - n % 2])):
            fields = {**WIDE, "heads": 128 // dim, "dim": dim, "dtype": kind, "expression": name}
            found.append(_case(f"{name}_wide_d{dim}", fields))
    for n, (name, fields) in enumerate(BESIDE.items()):
        where = {"q_rows": 20, "kv_rows": 29, "batch": 2, "heads": 4, "kv_heads": 2}
        found.append(_case(f"beside_{name}", {**where, "dtype": DTYPES[n % 4], **fields}))
    return found


def _case(name: str, fields: Fields) -> Case:
    return Case(f"expression_{name}", ("expression",), **{"dim": 8, **fields})


CASES = tuple(_cases())
