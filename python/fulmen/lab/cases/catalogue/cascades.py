# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests that share their first keys, and say so (kv_shared): what comes out is the same, however
many keys are said to be shared and whatever reads them.

Rows of a group over all requests are fewer than a tile of 64, more than one, and no multiple of
one; the shared keys end inside pages and behind the first key of some request.
"""

from __future__ import annotations

from typing import Any

from . import decodes
from .options import Fields, table

LENGTHS = (299, 0, 144, 145, 200, 299, 177, 250, 149)
SHARED: Fields = {
    "batch": 9, "heads": 16, "kv_heads": 2, "q_rows": 1, "dim": 64, "dim_v": 64, "kv_rows": 299,
    "kv_lengths": LENGTHS, "page_size": 16, "shared": 144, "kv_shared": (144,), "gradients": (),
    "dtype": "bfloat16",
}  # fmt: skip
# Each request but the last has fewer keys than are shared, or says so.
SAID = (144, 0, 130, 144, 99, 144, 140, 144, 144)

SHAPES: dict[str, Fields] = {
    "rows72": {},
    "rows36": {"heads": 8},
    "rows144_float16": {"heads": 32, "dtype": "float16", "pool": "rows_first"},
    "rows648": {"heads": 32, "kv_heads": 2, "q_rows": 4, "causal": True,
                "kv_lengths": (299, 0, 150, 155, 200, 299, 177, 250, 149)},
    "d128": {"dim": 128, "dim_v": 128, "pool": "rows_first"},
    "d96": {"dim": 96, "dim_v": 96},
    "d192_128": {"dim": 192, "dim_v": 128, "heads": 8},
    "d256_float16": {"dim": 256, "dim_v": 256, "heads": 4, "q_rows": 3, "causal": True,
                     "dtype": "float16", "kv_lengths": (299, 0, 150, 155, 200, 299, 177, 250, 149)},
    "page1": {"page_size": 1, "pool": "rows_first"},
    "page64": {"page_size": 64, "shared": 128, "kv_shared": (128,)},
    "page48": {"page_size": 48, "pool": "side_by_side"},
    "few": {"batch": 3, "kv_lengths": (299, 144, 200)},
    "float32": {"dtype": "float32"},
}  # fmt: skip
OPTIONS: dict[str, Fields] = {
    **{name: fields for name, fields in decodes.OPTIONS.items() if "kv_start" not in fields},
    "all_causal": {"causal": True},
    "none_said": {"kv_shared": (0,)},
    "fewer_said": {"kv_shared": (77,)},
    "beyond_said": {"kv_shared": (9000,), "shared": 288,
                    "kv_lengths": (288, 0, 280, 288, 286, 271, 288, 285, 288)},
    "each_says": {"kv_shared": SAID, "offsets": "int64"},
    "one_is_short": {"kv_lengths": (299, 0, 144, 7, 200, 299, 177, 250, 149)},
    "all_empty": {"kv_lengths": (0,) * 9},
    "first_empty": {"kv_lengths": (0, 299, 144, 0, 200, 299, 177, 250, 149)},
    "csr": {"csr": True},
    "high_sinks": {"sinks": "high", "causal": True},
    "start": {"kv_start": (37, 0, 1, 100, 0, 0, 0, 3, 0)},
    "float32_out": {"out_dtype": "float32"},
    "far_pool": {"pool": "far", "kv_heads": 1, "heads": 8},
    "negative_scale": {"scale": -0.2},
    "large_scores": {"scale": 400.0},
    "short_q": {"q_rows": 3, "q_lengths": (3, 1, 0, 2, 3, 3, 1, 3, 2), "causal": True,
                "kv_lengths": (299, 0, 150, 155, 200, 299, 177, 250, 149)},
    "packed": {"q_packed": (1, 0, 3, 2, 1, 1, 4, 0, 2), "q_tail": 2, "causal": True, "heads": 4,
               "kv_lengths": (299, 0, 150, 155, 200, 299, 177, 250, 149)},
}  # fmt: skip


def rows_of(options: dict[str, Fields]) -> dict[str, Any]:
    """With and without: what a row says beside what all have."""
    return {name: {**SHARED, **fields} for name, fields in options.items()}


CASES = [
    *table("cascade", ("caches",), rows_of({**SHAPES, **OPTIONS})),
    *table("cascade_quantised", ("quantised", "caches"),
           rows_of({"e4m3": {"kv_dtype": "float8_e4m3fn", "scales": "head"}})),
]  # fmt: skip
