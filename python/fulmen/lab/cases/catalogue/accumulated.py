# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Parts over disjoint keys, each merged into o, lse and stats where they lie, against one call;
and the gradients of parts, each added to dq, dk and dv.

Rows that see nothing in some parts or in all, parts of one key, scores that lie far apart from part
to part, sinks in the last call alone; where rows and keys stand is said by segments. Tiles are of
several blocks on tensor cores.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case

Fields = dict[str, Any]

SMALL: Fields = {"q_rows": 20, "kv_rows": 40, "dim": 8, "parts": (17, 1, 22)}
TILES: Fields = {
    "q_rows": 200, "kv_rows": 300, "kv_heads": 1, "dim": 64, "parts": (130, 70, 100),
    "dtype": "bfloat16",
}  # fmt: skip
STANDING: Fields = {"kv_segments": (((0, 40, 0),),)}  # checks says it for each part
CAUSAL: Fields = {"causal": True, "q_segments": (((0, 20, 13),),), **STANDING}
OPTIONS: dict[str, Fields] = {
    "full": {"heads": 4, "kv_heads": 2, "batch": 2},
    "sinks": {"sinks": "normal"},
    "high_sinks": {"sinks": "high"},
    "scale": {"scale": -0.4, "sinks": "low"},
    "empty_rows": {"masks": (("bool", "bhqk", "empty_rows"),)},
    "nothing": {"masks": (("bool", "1hqk", "nothing"),)},
    "few_pairs": {"masks": (("bool", "11qk", 0.05),), "poison": "nan_hidden"},
    "lengths": {"batch": 2, "q_lengths": (20, 7)},
    "nan_k": {"poison": "nan_k"},
    "inf_v": {"poison": "inf_v"},
    "views": {"views": (("q", "gapped"), ("k", "rows_first"), ("v", "stepped"))},
    "spread": {"inputs": "spread_50"},
    "opposed": {"inputs": "opposed_100"},
    "huge": {"inputs": "huge"},
    "causal": CAUSAL,
    "window": {**CAUSAL, "window": (9, 0), "sinks": "normal"},
    "alibi": {**CAUSAL, "alibi": "h"},
    "dropout": {**CAUSAL, "dropout_p": 0.25, "rng": (5, 6)},
}
OF_TILES: dict[str, Fields] = {
    "full": {},
    "float16": {"dtype": "float16"},
    "dim128": {"dim": 128, "heads": 4},
    "dim256": {"dim": 256},
    "dim320": {"dim": 320},
    "dim80": {"dim": 80, "dim_v": 48},
    "few_rows": {"q_rows": 7, "heads": 8},
    "many": {"dim": 128, "q_rows": 65, "batch": 8, "heads": 36, "kv_heads": 4},  # largest tiles
    "sinks": {"sinks": "normal"},
    "spread": {"inputs": "spread_50", "dtype": "float16"},
    "huge": {"inputs": "huge"},
    "outlier": {"inputs": "outlier"},
    "nan_q": {"poison": "nan_q"},
    "inf_v": {"poison": "inf_v", "dtype": "float16"},
    "few_pairs": {"masks": (("bool", "11qk", 0.01),), "poison": "nan_hidden"},
    "lengths": {"batch": 2, "q_lengths": (200, 65)},
    "causal": {
        "causal": True, "q_segments": (((0, 90, 70), (90, 110, 211)),),
        "kv_segments": (((0, 300, 0),),),
    },
    "dropout": {
        "dropout_p": 0.25, "rng": (5, 6), "q_segments": (((0, 200, 0),),),
        "kv_segments": (((0, 300, 0),),),
    },
}  # fmt: skip

GRADIENTS = (
    "full", "float16", "dim128", "dim256", "dim80", "few_rows", "sinks", "few_pairs", "lengths",
    "causal", "dropout", "nan_q", "huge",
)  # fmt: skip


def _cases() -> list[Case]:
    found = [
        _case(f"{dtype}_{option}" if option == "full" else option, {**SMALL, **own, "dtype": dtype})
        for n, (option, own) in enumerate(OPTIONS.items())
        for dtype in (DTYPES if option == "full" else DTYPES[n % 4 : n % 4 + 1])
    ]
    found += [_case(f"tiles_{option}", {**TILES, **own}) for option, own in OF_TILES.items()]
    found += [
        _case(
            f"gradients_tiles_{option}", {**TILES, **OF_TILES[option], "gradients": ("q", "k", "v")}
        )
        for option in GRADIENTS
    ]
    for n, dtype in enumerate(DTYPES):
        own = {**OPTIONS["full"], **CAUSAL, "gradients": ("q", "k", "v")}
        found.append(
            _case(f"gradients_{dtype}", {**SMALL, **own, "dtype": dtype, "batch": 1 + n % 2})
        )
    eight_bits: Fields = {"eight_bits": True, "kv_dtype": "float8_e4m3fn", "scales": "head"}
    found.append(_case("tiles_e4m3", {**TILES, **eight_bits}))
    return found


def _case(name: str, fields: Fields) -> Case:
    own = {"check": "accumulate", "gradients": (), **fields}
    return Case(f"accumulate_{name}", ("accumulate",), **own)


CASES = tuple(_cases())
