# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits, with scales of every extent: whole arrays and caches in pages.

Each type of keys stands beside each type of queries, its own among them. Forward only, as such
calls are.
"""

from __future__ import annotations

from itertools import product

from ..quantised import CHANNEL, MOST, ODD, SCALES
from .options import Fields, table

QUERIES = ("float32", "float16", "bfloat16")
PAIRS = tuple(product(MOST, QUERIES))

OPTIONS: dict[str, Fields] = {
    "window": {"window": (20, 0), "causal": True},
    "softcap": {"softcap": 2.0},
    "sinks_alibi": {"sinks": "normal", "alibi": "h", "causal": True},
    "mask_bias": {"masks": (("bool", "1h1k", 0.6),), "bias": "11qk same hides"},
    "scale": {"scale": -0.7},
    "start": {"kv_start": (7, 0, 20), "causal": True},
    "tree": {"masks": (("tree", "branches"),), "positions": "before"},
    "outlier": {"inputs": "outlier"},
}


def whole() -> dict[str, Fields]:
    """k and v as they are, in memory of several kinds; queries few and many."""
    made: dict[str, Fields] = {}
    for n, ((kv_dtype, dtype), scales) in enumerate(product(PAIRS, SCALES)):
        made[f"{kv_dtype}_{dtype}_{scales or 'unscaled'}"] = {
            "kv_dtype": kv_dtype, "dtype": dtype, "scales": scales,
            "q_rows": (40, 1, 5)[n % 3], "causal": n % 2 == 1, "dim": (32, 16, 33)[n % 3],
            "dim_v": (32, 64, 9)[n % 3],
            "views": (("k v", ("contiguous", "rows_first", "gapped", "dims_first")[n % 4]),),
        }  # fmt: skip
    for n, (kv_dtype, scales) in enumerate(product(MOST, ("head", "row"))):
        common: Fields = {"kv_dtype": kv_dtype, "scales": scales, "dtype": QUERIES[n % 3]}
        if kv_dtype != "int8" or scales == "row":
            made[f"hidden_nan_{kv_dtype}_{scales}"] = {
                **common, "kv_lengths": (70, 3), "q_rows": 9, "poison": "nan_hidden",
            }  # fmt: skip
        if kv_dtype != "int8":
            made[f"nan_v_{kv_dtype}_{scales}"] = {**common, "poison": "nan_v", "causal": True}
            made[f"nan_k_{kv_dtype}_{scales}"] = {**common, "poison": "nan_k"}
        made[f"packed_{kv_dtype}_{scales}"] = {
            **common, "q_packed": (1, 40, 0, 7), "kv_packed": (33, 40, 5, 70), "causal": True,
        }  # fmt: skip
    return made


def paged() -> dict[str, Fields]:
    """In pages of several sizes, with options one at a time, and batches of mixed rows."""
    made: dict[str, Fields] = {}
    for n, ((name, fields), kv_dtype) in enumerate(product(OPTIONS.items(), MOST)):
        made[f"{name}_{kv_dtype}"] = {
            **fields, "kv_dtype": kv_dtype, "dtype": QUERIES[(n + n // 3) % 3],
            "scales": SCALES[n % 4], "page_size": (1, 3, 16, 64)[n % 4], "csr": n % 3 == 0,
            "pool": ("heads_first", "rows_first", "interleaved", "side_by_side")[n // 2 % 4],
        }  # fmt: skip
    for n, (kv_dtype, dtype) in enumerate(PAIRS):
        made[f"decode_{kv_dtype}_{dtype}"] = {
            "kv_dtype": kv_dtype, "dtype": dtype, "scales": SCALES[1 + n % 3], "q_rows": 1,
            "heads": 8, "dim": 64, "check": "moved", "pool": ("heads_first", "rows_first")[n % 2],
        }  # fmt: skip
        made[f"mixed_{kv_dtype}_{dtype}"] = {
            "kv_dtype": kv_dtype, "dtype": dtype, "scales": SCALES[1 + (n + 1) % 3],
            "q_packed": (1, 33, 4), "kv_lengths": (70, 40, 4), "causal": True,
        }  # fmt: skip
    for n, ((kv_dtype, dtype), kv_heads) in enumerate(product(PAIRS, (2, 8))):
        made[f"shared_{kv_dtype}_{dtype}_h{kv_heads}"] = {  # few row tiles, shared by clusters
            "kv_dtype": kv_dtype, "dtype": dtype, "scales": SCALES[n % 4], "batch": 1,
            "q_rows": 1 + n % 3, "heads": 4 * kv_heads, "kv_heads": kv_heads, "dim": 64,
            "kv_rows": 300, "kv_lengths": (299 - n,), "page_size": (16, 0)[n % 2], "causal": True,
        }  # fmt: skip
    return made


def odd_scales() -> dict[str, Fields]:
    """Some scales 0, negative, infinite, NaN or far larger than others, of rows or of heads."""
    made: dict[str, Fields] = {}
    for n, (array, odd) in enumerate(product("kv", ODD)):
        for m, (kv_dtype, dtype) in enumerate(PAIRS):
            if odd == "far" and (array == "k" or dtype == "float16"):
                continue  # scores and values of 1e18
            made[f"scale_{array}_{odd}_{kv_dtype}_{dtype}"] = {
                "kv_dtype": kv_dtype, "dtype": dtype, "heads": 8, "dim": 64, "causal": True,
                "scales": f"{('row', 'row', 'head')[(m + n) % 3]} {array} {odd}",
                "q_rows": (1, 5)[(n + m) % 2], "page_size": (16, 0)[(n + m // 2) % 2],
            }  # fmt: skip
    return made


def all_of_8_bits() -> dict[str, Fields]:
    """q, k and v of one type; o of each type that it may have."""
    made: dict[str, Fields] = {}
    for n, ((dtype, o), scales) in enumerate(product(PAIRS, (*SCALES, CHANNEL))):
        made[f"{dtype}_{o}_{scales or 'unscaled'}"] = {
            "kv_dtype": dtype, "dtype": o, "scales": scales, "causal": n % 2 == 0,
            "q_rows": (40, 70, 1, 130)[n % 4], "kv_rows": (70, 130)[n % 2],
            "dim": (64, 96, 128, 33)[n % 4], "dim_v": (64, 32, 128, 9)[n % 4],
            "views": (("q k v", ("contiguous", "rows_first", "gapped", "dims_first")[n % 4]),),
        }  # fmt: skip
    for n, (name, fields) in enumerate(OPTIONS.items()):
        made[name] = {
            **fields, "kv_dtype": tuple(MOST)[n % 3], "dtype": QUERIES[n // 3 % 3],
            "scales": CHANNEL, "q_rows": (5, 33)[n % 2], "kv_lengths": (70, 34), "dim": 64,
            **({"kv_start": (7, 20)} if name == "start" else {}),
        }  # fmt: skip
        if name == "tree":
            made[name]["q_rows"] = 5
    for n, (array, odd) in enumerate(product("kv", ODD)):
        if odd != "far":
            made[f"scale_{array}_{odd}"] = {
                "kv_dtype": "float8_e4m3fn", "dtype": QUERIES[n % 3], "causal": True,
                "scales": f"head {array} {odd}", "q_rows": 80, "dim": 64,
            }  # fmt: skip
    for n, (dim, dim_v) in enumerate(((96, 96), (80, 112), (160, 144), (192, 128), (256, 256))):
        made[f"dims_{dim}_{dim_v}"] = {
            "kv_dtype": "float8_e4m3fn", "dtype": QUERIES[1 + n % 2], "scales": CHANNEL,
            "q_rows": 20, "kv_rows": (130, 270)[n % 2], "dim": dim, "dim_v": dim_v,
            "causal": n % 2 == 0,
        }  # fmt: skip
    made["packed_256"] = {
        "kv_dtype": "float8_e4m3fn", "dtype": "bfloat16", "scales": CHANNEL, "dim": 256,
        "q_packed": (1, 40, 0, 7), "kv_packed": (33, 40, 5, 170), "causal": True,
    }  # fmt: skip
    for n, dtype in enumerate(MOST):
        common: Fields = {"kv_dtype": dtype, "dtype": QUERIES[n], "scales": CHANNEL, "dim": 64}
        made[f"packed_{dtype}"] = {
            **common, "q_packed": (1, 40, 0, 7), "kv_packed": (33, 40, 5, 70), "causal": True,
        }  # fmt: skip
        made[f"paged_{dtype}"] = {
            **common, "q_rows": 5, "kv_lengths": (70, 3), "page_size": 16, "causal": True,
        }  # fmt: skip
        if dtype != "int8":
            made[f"nan_q_{dtype}"] = {**common, "poison": "nan_q", "q_rows": 9}
            made[f"nan_v_{dtype}"] = {**common, "poison": "nan_v", "causal": True}
            made[f"hidden_nan_{dtype}"] = {
                **common, "kv_lengths": (70, 3), "q_rows": 9, "poison": "nan_hidden",
            }  # fmt: skip
    return made


COMMON: Fields = {"batch": 2, "heads": 4, "kv_heads": 2, "kv_rows": 70, "gradients": ()}
PAGED: Fields = {
    **COMMON, "batch": 3, "q_rows": 5, "kv_lengths": (70, 0, 34), "page_size": 16, "causal": False,
}  # fmt: skip

CASES = [
    *table("quantised", ("quantised",), whole(), **COMMON),
    *table("eight_bits", ("quantised",), all_of_8_bits(), **COMMON, eight_bits=True),
    *table("quantised_caches", ("quantised", "caches"), paged(), **PAGED),
    *table("quantised", ("quantised", "caches"), odd_scales(), **{**PAGED, "kv_heads": 2}),
]
