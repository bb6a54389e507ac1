# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows and keys that are parts of a longer sequence: what every option means by their positions.

Each layout of segments stands over the options that speak of positions; layouts of tiles are of
several blocks on tensor cores, with bounds that are multiples of no block.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case
from .options import ALL_SCORE_OPTIONS, MASKS

Fields = dict[str, Any]

# Chunks 0 and 3 of four, as a zigzag has them, against all keys or against those of another rank.
ZIGZAG = ((0, 10, 0), (10, 10, 30))
OTHER = ((0, 10, 10), (10, 10, 20))
LAYOUTS: dict[str, Fields] = {
    "whole": {"q_segments": (ZIGZAG,), "kv_segments": (((0, 40, 0),),)},
    "rows_alone": {"q_segments": (ZIGZAG,)},
    "other_rank": {"q_segments": (ZIGZAG,), "kv_segments": (OTHER,), "kv_rows": 20},
    "gaps": {  # rows and keys that no segment has, segments without rows, any order
        "q_segments": (((12, 7, 3), (2, 5, 21), (0, 0, 0)),),
        "kv_segments": (((30, 9, 0), (1, 12, 9), (15, 11, 22)),),
    },
    "far": {  # positions that no array of the call has
        "q_segments": (((0, 20, 2000000007),),),
        "kv_segments": (((0, 33, 1999999990), (33, 7, 2000000023)),),
    },
    "by_request": {
        "q_segments": (ZIGZAG, ((0, 20, 5), (0, 0, 0))),
        "kv_segments": (((0, 40, 0), (0, 0, 0)), OTHER),
        "offsets": "int64",
    },
}
OPTIONS: dict[str, Fields] = {
    "full": {},
    "causal": {"causal": True, "need_each": True},
    "window": {"window": (6, 2)},
    "causal_window": {"causal": True, "window": (9, 0), "sinks": "normal"},
    "alibi": {"alibi": "bh", "causal": True},
    "bias": {"bias": "bhqk", "masks": (("bool", "b11k", 0.8),), "causal": True},
    "scores": {**ALL_SCORE_OPTIONS, "scale": -0.4, "dlse": True},
    "lengths": {"q_lengths": (20, 13), "kv_lengths": (17, 20), "causal": True},
    "text": {"expression": "alibi", "causal": True},
    "mask_text": {"expression": "dilated", "alibi": "h"},
}
MASKED: dict[str, Fields] = {
    name.replace(" ", "_"): {"masks": kept, "causal": True} for name, kept in MASKS.items() if name
}
DROPPED: Fields = {"dropout_p": 0.25, "rng": (5, 6), "causal": True}
TILES: Fields = {
    "q_rows": 200, "kv_rows": 300, "heads": 2, "kv_heads": 1, "dim": 64,
    "q_segments": (((0, 90, 70), (90, 110, 411)),),
    "kv_segments": (((0, 70, 0), (70, 131, 160), (201, 99, 500)),),
}  # fmt: skip
OF_TILES: dict[str, Fields] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (80, 0)},
    "alibi": {"causal": True, "alibi": "h"},
    "bias": {"bias": "1hqk", "causal": True},
    "text": {"expression": "both"},
    "dropout": DROPPED,
    "dropout_of_eights": {  # drawn eight keys at a time
        **DROPPED,
        "q_segments": (((0, 91, 64), (91, 109, 409)),),
        "kv_segments": (((0, 72, 0), (72, 128, 160), (200, 90, 496)),),
    },
    "dim128": {"causal": True, "dim": 128, "heads": 4, "kv_heads": 2},
    **MASKED,
}


def _cases() -> list[Case]:
    found = []
    for m, (option, own) in enumerate({**OPTIONS, **MASKED}.items()):
        for n, (layout, fields) in enumerate(LAYOUTS.items()):
            # Causal over every layout, else two of them: each text is kernels of its own.
            if option != "causal" and n % 3 != m % 3:
                continue
            if layout == "far" and "expression" in own:
                continue  # its functions of NumPy are of the type of sums
            common = {"dtype": DTYPES[(n + m) % 4], "batch": 2, "heads": 4, "kv_heads": 2}
            found.append(_case(f"{layout}_{option}", {**common, **fields, **own}))
    for n, (layout, fields) in enumerate(LAYOUTS.items()):
        if layout != "far":
            dropped = {**fields, **DROPPED, "batch": 2, "dtype": DTYPES[n % 4]}
            found.append(_case(f"{layout}_dropout", dropped))
    packed = {"q_packed": (12, 0, 20), "kv_packed": (9, 4, 31), "q_tail": 2, "causal": True}
    of_sequences = {
        "q_segments": (((0, 12, 4),), ((0, 0, 0),), ((8, 12, 40),)),
        "kv_segments": (((0, 9, 0),), ((0, 4, 0),), ((0, 31, 20),)),
    }
    found.append(_case("packed", {**packed, **of_sequences}))
    found.append(_case("packed_dropout", {**packed, **of_sequences, **DROPPED}))
    found.append(_case("hidden_nan", {**LAYOUTS["gaps"], "poison": "nan_hidden", "causal": True}))
    for n, (option, own) in enumerate(OF_TILES.items()):
        found.append(_case(f"tiles_{option}", {**TILES, "dtype": DTYPES[2 + n % 2], **own}))
    return found


def _case(name: str, fields: Fields) -> Case:
    where: Fields = {"q_rows": 20, "kv_rows": 40, "dim": 8}
    return Case(f"segments_{name}", ("segments",), **{**where, **fields})


CASES = tuple(_cases())
