# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: a slot for each key, in any order, and keys that have none.

Most have one query row a request, as calls over lists of chosen keys do, with the heads of latent
attention or groups; the rest what else such a table meets: several rows, masks, scales, packed
rows, pools that are large and pages that are 1, 5 or 64 rows.
"""

from __future__ import annotations

from typing import Any

from ..case import Case
from .options import Fields, table


def sparse(name: str, rows: dict[str, Fields], **common: Any) -> list[Case]:
    """A table of cases without gradients, over slots."""
    fields: Fields = {"gradients": (), "slots": True, "page_size": 64, "q_rows": 1, **common}
    return table(f"sparse_{name}", ("caches", "sparse"), rows, **fields)


LATENT: Fields = {
    "kv_heads": 1, "dim": 576, "dim_v": 512, "inputs": "latent", "pool": "latent",
    "dtype": "bfloat16",
}  # fmt: skip


def latent() -> list[Case]:
    """The heads of latent attention over lists of every length."""
    rows: dict[str, Fields] = {}
    for n, heads in enumerate((1, 8, 16, 64, 128)):
        rows[f"heads{heads}"] = {
            "heads": heads, "page_size": (64, 1, 5)[n % 3], "dtype": ("bfloat16", "float16")[n % 2],
            "sinks": ("", "normal")[n % 2],
        }  # fmt: skip
    for n, length in enumerate((1, 31, 63, 64, 65, 127, 129, 257)):
        rows[f"k{length}"] = {
            "heads": 4, "kv_lengths": (length, 0, length - 1), "kv_rows": length, "csr": n % 4 == 0,
            "page_size": (1, 64, 7)[n % 3],
        }  # fmt: skip
    return sparse("latent", rows, batch=3, kv_rows=131, kv_lengths=(131, 0, 66), **LATENT)


OPTIONS: dict[str, Fields] = {
    "full": {},
    "groups": {"heads": 6, "kv_heads": 2, "dim_v": 32},
    "page_of_one": {"page_size": 1},
    "rows": {"q_rows": 20},
    "causal": {"q_rows": 9, "causal": True},
    "window": {"q_rows": 9, "window": (17, 3)},
    "start": {"kv_start": (7, 0, 20)},
    "sinks": {"sinks": "high"},
    "negative_scale": {"scale": -0.2},
    "alibi": {"alibi": "bh", "q_rows": 3},
    "bias": {"bias": "b1qk", "q_rows": 3, "csr": True},
    "bool": {"masks": (("bool", "b11k", 0.6),)},
    "tree": {"masks": (("tree", "branches"),), "q_rows": 5},
    "dropout": {"dropout_p": 0.25, "rng": (5, 9)},
    "float64": {"dtype": "float64"},
    "float32_out": {"dtype": "float16", "out_dtype": "float32"},
    "e4m3": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "scales": "row"},
    "int8": {"dtype": "float32", "kv_dtype": "int8", "scales": "head"},
    "far": {"pool": "far", "page_size": 16},
    "moved": {"check": "moved"},
    "alone": {"check": "alone"},
    "wide": {"heads": 2, "dim": 256, "dtype": "bfloat16"},
}


def options() -> list[Case]:
    """What else a call over slots may have."""
    shape: Fields = {"batch": 3, "heads": 4, "kv_heads": 1, "kv_rows": 90, "dim": 32}
    return sparse("option", OPTIONS, **shape, kv_lengths=(90, 12, 65))


def packed() -> list[Case]:
    """Rows of several requests, packed."""
    rows: dict[str, Fields] = {
        "rows": {"q_packed": (1, 30, 1, 7), "kv_lengths": (100, 64, 1, 30), "kv_rows": 100},
        "tail": {"q_packed": (2, 0, 1), "q_tail": 3, "kv_lengths": (40, 5, 0), "kv_rows": 40},
    }
    return sparse("packed", rows, heads=4, dim=32, causal=True)


RECORD_KINDS: dict[str, Fields] = {"656": {"records": 656}, "584": {"records": 584, "dim": 512}}


def of_records() -> list[Case]:
    """Records of both layouts, dense and sparse: heads, pages, lengths at the ends of tiles."""
    rows: dict[str, Fields] = {}
    for kind, fields in RECORD_KINDS.items():
        for n, (heads, page, length) in enumerate(
            ((1, 64, 65), (16, 1, 31), (64, 16, 64), (128, 5, 129))
        ):
            shape: Fields = {
                **fields, "heads": heads, "page_size": page, "kv_rows": length,
                "kv_lengths": (length, 0, length - 1),
                "dtype": ("bfloat16", "float16", "float32")[n % 3],
            }  # fmt: skip
            rows[f"{kind}_heads{heads}"] = {**shape, "slots": n % 2 == 0}
            rows[f"{kind}_rows_heads{heads}"] = {
                **shape, "slots": n % 2 == 1, "q_rows": 1 + 2 * (n % 2), "causal": n % 2 == 0,
                "sinks": "normal", "dim_v": (512, 500)[n % 2], "pool": "heads_first",
            }  # fmt: skip
    return sparse("records", rows, batch=3, **LATENT)


CASES = latent() + options() + packed() + of_records()
