# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: lists of blocks over shapes, layouts of sequences, dtypes and options."""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case
from .options import ALL_SCORE_OPTIONS

Fields = dict[str, Any]

PLACES: dict[str, Fields] = {
    "square": {"q_rows": 200, "kv_rows": 200, "heads": 2},
    "chunk": {"q_rows": 70, "kv_rows": 330, "batch": 2, "heads": 4, "kv_heads": 2},
    "row": {"q_rows": 1, "kv_rows": 300, "heads": 4, "kv_heads": 1, "batch": 2},
    "padded": {
        "batch": 3, "q_rows": 130, "kv_rows": 140, "heads": 2, "q_lengths": (130, 5, 0),
        "kv_lengths": (140, 70, 9),
    },
    "packed": {
        "q_packed": (65, 0, 130), "kv_packed": (70, 4, 200), "heads": 2, "q_tail": 2, "kv_tail": 1,
    },
    "pages": {
        "batch": 2, "q_rows": 3, "kv_rows": 200, "kv_lengths": (200, 133), "page_size": 16,
        "heads": 4, "kv_heads": 2, "gradients": (),
    },
}  # fmt: skip
SIZES = ((64, 64), (128, 64), (64, 128), (192, 128))
AXES = ("11", "bh", "1k", "b1")
BESIDE: dict[str, Fields] = {
    "scores": ALL_SCORE_OPTIONS,
    "dropout": {"dropout_p": 0.25, "rng": (5, 6)},
    "window": {"window": (100, 3), "sinks": "normal", "dlse": True},
    "expression": {"expression": "both"},
    "hidden": {"poison": "nan_hidden"},
}


def _cases() -> list[Case]:
    found = []
    for n, (place, fields) in enumerate(PLACES.items()):
        for m, (size, axes) in enumerate(zip(SIZES, AXES)):
            lists = {"masks": (("blocks", size, axes),), "causal": m % 2 == 0}
            kind = DTYPES[(n + m) % 4]
            name = f"{place}_{size[0]}x{size[1]}"
            found.append(_case(name, {**fields, "dtype": kind, **lists}))
    for n, (name, fields) in enumerate(BESIDE.items()):
        where = {"q_rows": 130, "kv_rows": 150, "batch": 2, "heads": 4, "kv_heads": 2}
        lists = {"masks": (("blocks", (64, 64), "bh"),)}
        found.append(_case(f"beside_{name}", {**where, "dtype": DTYPES[n % 4], **lists, **fields}))
    return found


def _case(name: str, fields: Fields) -> Case:
    return Case(f"blocks_{name}", ("blocks",), **{"dim": 8, **fields})


CASES = tuple(_cases())
