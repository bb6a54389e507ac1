# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Decoding as servers do it: few 16-bit queries over caches of 16 and of 8 bits, in shapes that the
kernel which divides keys among multiprocessors takes on every GPU since Ampere.

Lengths end in the middle of tiles, of pages and of the keys of a block, and some requests are
empty; groups of heads fill a row tile once, in part, and more than once.
"""

from __future__ import annotations

from itertools import product

from ..quantised import MOST, SCALES
from .options import Fields, table

QUERIES = ("bfloat16", "float16")
# Head dims, query heads, heads of keys, query rows, rows of a page.
SHAPES = (
    (64, 64, 8, 1, 1, 16),
    (128, 128, 8, 2, 1, 16),
    (128, 128, 16, 1, 4, 1),
    (128, 128, 16, 1, 4, 64),
    (80, 64, 24, 2, 2, 48),
    (96, 96, 6, 2, 3, 64),
    (192, 128, 4, 4, 2, 16),
    (256, 256, 4, 1, 8, 16),
)
OPTIONS: dict[str, Fields] = {
    "window": {"window": (40, 0), "causal": True},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": "normal"},
    "alibi": {"alibi": "h", "causal": True},
    "start": {"kv_start": (37, 0, 1, 100)},
    "positions": {"positions": "before", "causal": True},
    "tree": {"masks": (("tree", "branches"),), "q_rows": 7},
    "all": {
        "window": (150, 0), "causal": True, "softcap": 3.0, "sinks": "normal", "alibi": "bh",
        "kv_start": (3, 0, 1, 64), "csr": True,
    },
}  # fmt: skip


def of_shapes(narrow: bool) -> dict[str, Fields]:
    """Every shape with each dtype of queries; where `narrow`, over caches of 8 bits in turn."""
    made: dict[str, Fields] = {}
    for n, (shape, dtype) in enumerate(product(SHAPES, QUERIES)):
        dim, dim_v, heads, kv_heads, rows, page = shape
        name = f"d{dim}_{dim_v}_heads{heads}_{kv_heads}_q{rows}_page{page}_{dtype}"
        made[name] = {
            "dim": dim, "dim_v": dim_v, "heads": heads, "kv_heads": kv_heads, "q_rows": rows,
            "page_size": page, "dtype": dtype, "causal": rows > 1, "csr": n % 3 == 1,
            "pool": ("rows_first", "heads_first", "side_by_side")[n % 3],
        }  # fmt: skip
        if narrow:
            kv_dtype = tuple(MOST)[n % 3]
            made[name].update(kv_dtype=kv_dtype, scales=SCALES[(n + n // 3) % 4])
    return made


def of_options(narrow: bool) -> dict[str, Fields]:
    """Options one at a time and together, at d 64."""
    made: dict[str, Fields] = {}
    for n, (name, fields) in enumerate(OPTIONS.items()):
        made[name] = {**fields, "dtype": QUERIES[n % 2], "page_size": (16, 1, 64)[n % 3]}
        if narrow:
            made[name].update(kv_dtype=tuple(MOST)[n % 3], scales=SCALES[1 + n % 3])
    return made


COMMON: Fields = {
    "batch": 4, "heads": 8, "kv_heads": 2, "q_rows": 1, "dim": 64, "dim_v": 64, "kv_rows": 301,
    "kv_lengths": (301, 0, 16, 143), "page_size": 16, "gradients": (),
}  # fmt: skip

CASES = [
    *table("decode", ("caches",), {**of_shapes(False), **of_options(False)}, **COMMON),
    *table("decode_quantised", ("quantised", "caches"), {**of_shapes(True), **of_options(True)},
           **COMMON),
]  # fmt: skip
