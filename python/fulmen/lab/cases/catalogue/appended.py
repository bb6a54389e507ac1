# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches that are written by append_kv, and rotary embeddings: see cases/appended.py.

Every layout of pools, page sizes, both kinds of table, all dtypes; dims of whole vectors and of
none. b19 is the report of slots of -1 (vllm#43869, sglang#36207): rows that are skipped change
nothing, and what an unused slot holds never shows.
"""

from __future__ import annotations

from itertools import product

from ..arrays import DTYPES
from ..case import Case
from .options import Fields, table

POOLS = ("heads_first", "rows_first", "interleaved", "side_by_side", "layers")
DIMS = ((64, 64), (16, 16), (3, 7), (33, 5), (128, 32))


def rows() -> dict[str, Fields]:
    """One case of each dtype and layout."""
    made: dict[str, Fields] = {}
    for n, (dtype, pool) in enumerate(product(DTYPES, POOLS)):
        dim, dim_v = DIMS[n % len(DIMS)]
        made[f"{dtype}_{pool}"] = {
            "dtype": dtype,
            "pool": pool,
            "dim": dim,
            "dim_v": dim_v,
            "page_size": (1, 5, 16)[n % 3],
            "csr": n % 2 == 1,
            "offsets": ("int32", "int64")[n % 3 % 2],
            "kv_lengths": ((21, 0, 8), (5, 40, 1))[n % 2],
            "kv_rows": (21, 40)[n % 2],
        }
    return made


def of_records() -> list[Case]:
    """Records of latent attention: each dtype of the rows, pages of one row and of many."""
    made: dict[str, Fields] = {}
    kinds: tuple[Fields, ...] = ({"records": 656, "dim": 576}, {"records": 584, "dim": 512})
    for n, (fields, dtype) in enumerate(product(kinds, ("bfloat16", "float16", "float32"))):
        made[f"{dtype}_{fields['records']}"] = {
            **fields, "dtype": dtype, "page_size": (5, 64, 1)[n % 3], "csr": n % 2 == 1,
            "offsets": ("int32", "int64")[n % 2], "kv_lengths": ((21, 0, 8), (5, 40, 1))[n % 2],
            "kv_rows": (21, 40)[n % 2],
        }  # fmt: skip
    common: Fields = {**COMMON, "kv_heads": 1, "dim_v": 512, "inputs": "latent", "pool": "latent"}
    return table("appended_records", ("caches", "append"), made, **common)


COMMON: Fields = {
    "batch": 3, "heads": 4, "kv_heads": 2, "q_rows": 2, "gradients": (), "causal": True,
    "check": "appended",
}  # fmt: skip

CASES = [
    *table("appended", ("caches", "append"), rows(), **COMMON),
    *of_records(),
    Case("b19_slots_that_are_skipped", ("caches", "append"), "vllm#43869, sglang#36207", batch=3,
         heads=4, kv_heads=2, dim=64, q_rows=1, kv_rows=33, kv_lengths=(33, 1, 0), page_size=16,
         dtype="bfloat16", gradients=(), check="appended"),
    Case("b18_the_last_column_of_a_table", ("caches", "append"), "sglang#35985, #29665", batch=2,
         heads=2, dim=32, q_rows=3, kv_rows=64, kv_lengths=(64, 61), page_size=16, causal=True,
         dtype="float16", gradients=(), check="appended"),
]  # fmt: skip
