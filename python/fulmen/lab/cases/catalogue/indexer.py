# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse latent attention: see cases/indexed.py.

Dtypes, heads and dims of whole tiles and of none, lengths around topk and around a tile of keys,
pages, rows that see no key, scores that are all equal, NaN.
"""

from __future__ import annotations

from itertools import product

from ..case import Case
from .options import Fields, table

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((1, 1), (3, 20), (16, 64), (33, 33), (64, 128))  # heads, dim


def indexer(name: str, rows: dict[str, Fields], **common: object) -> list[Case]:
    """A table of cases with one head of keys."""
    fields: Fields = {"gradients": (), "kv_heads": 1, "check": "indexed", "batch": 2, **common}
    return table(f"indexer_{name}", ("indexer",), rows, **fields)


def shapes() -> list[Case]:
    """Heads and dims, in pages and without."""
    rows: dict[str, Fields] = {}
    for n, ((heads, dim), dtype) in enumerate(product(SHAPES, DTYPES)):
        rows[f"heads{heads}_dim{dim}_{dtype}"] = {
            "heads": heads, "dim": dim, "dtype": dtype, "topk": (20, 64, 7)[n % 3],
            "page_size": (0, 16, 5, 1)[n % 4], "causal": n % 2 == 0,
            "kv_lengths": (150, 67) if n % 4 else (),
        }  # fmt: skip
    return indexer("shape", rows, q_rows=3, kv_rows=150)


def lengths() -> list[Case]:
    """No key, fewer than topk, as many, one more; ends of tiles; more than are kept at once."""
    rows: dict[str, Fields] = {}
    for n, length in enumerate((0, 1, 15, 16, 17, 127, 128, 129, 255, 257, 700)):
        rows[f"k{length}"] = {
            "kv_lengths": (length, max(length - 1, 0)), "kv_rows": max(length, 1),
            "page_size": (64, 1, 7)[n % 3], "dtype": DTYPES[n % 3], "causal": n % 2 == 1,
        }  # fmt: skip
    return indexer("length", rows, topk=16, heads=4, dim=32, q_rows=2)


ODD: dict[str, Fields] = {
    "zeros": {"inputs": "zeros"},
    "nan_k": {"poison": "nan_k"},
    "topk_1": {"topk": 1},
    "topk_600": {"topk": 600},
    "more_rows_than_keys": {"q_rows": 9, "kv_rows": 5, "causal": True, "topk": 3},
    "strides": {"views": (("q", "stepped"), ("k", "stepped"))},
}  # fmt: skip


def odd() -> list[Case]:
    """What is equal, NaN, of one key, or has strides."""
    shape: Fields = {"topk": 16, "heads": 4, "dim": 24, "q_rows": 2, "kv_rows": 300}
    return indexer("odd", ODD, dtype="bfloat16", **shape)


CASES = [*shapes(), *lengths(), *odd()]
