# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek-V2, 2024): keys of 576 numbers whose first 512 are the values, one
head of them for all query heads, in pages and as one page for each request.

Row counts stand at both ends of a tile of 64 rows, lengths at those of halves and blocks of keys.
"""

from __future__ import annotations

from typing import Any

from ..case import Case
from .options import Fields, table


def latent(name: str, rows: dict[str, Fields], **common: Any) -> list[Case]:
    """A table of cases without gradients, in one pool."""
    fields: Fields = {
        "gradients": (), "kv_heads": 1, "dim": 576, "dim_v": 512, "inputs": "latent",
        "pool": "latent", "dtype": "bfloat16", "page_size": 64, "causal": True, **common,
    }  # fmt: skip
    return table(f"latent_{name}", ("caches", "latent"), rows, **fields)


HEADS = (1, 3, 8, 9, 16, 63, 64, 126, 128)


def shapes() -> list[Case]:
    """Any number of heads and of new rows, pages of every size."""
    rows: dict[str, Fields] = {}
    for n, heads in enumerate(HEADS):
        rows[f"heads{heads}"] = {
            "heads": heads, "page_size": (64, 1, 16, 8, 32)[n % 5], "q_rows": 1 + n % 3 % 2,
            "dtype": ("bfloat16", "float16")[n % 2],
        }  # fmt: skip
    for n, q_len in enumerate((2, 4, 5, 16)):
        rows[f"q{q_len}"] = {"heads": (16, 24, 13, 8)[n], "q_rows": q_len}
    return latent("shape", rows, batch=3, q_rows=1, kv_rows=131, kv_lengths=(131, 0, 66))


def residues() -> list[Case]:
    """Lengths at the ends of halves and blocks of keys, some beside an empty request."""
    rows: dict[str, Fields] = {}
    for n, length in enumerate((1, 2, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)):
        rows[f"k{length}"] = {
            "kv_lengths": (length, 0, max(length - 1, 0)), "kv_rows": length,
            "page_size": (64, 16, 320)[n % 3], "csr": n % 4 == 0, "q_rows": 1 + n % 2,
        }  # fmt: skip
    return latent("residue", rows, batch=3, heads=16)


OPTIONS: dict[str, Fields] = {
    "full": {"causal": False},
    "window": {"window": (40, 0)},
    "window_of_one": {"window": (0, 0), "causal": False},
    "top_left": {"alignment": "top_left"},
    "sinks": {"sinks": "normal"},
    "high_sinks": {"sinks": "high"},
    "scale": {"scale": 0.01},
    "negative_scale": {"scale": -0.05},
    "q_lengths": {"q_lengths": (3, 0, 1)},
    "float32_out": {"out_dtype": "float32"},
    "start": {"kv_start": (7, 0, 20)},
    "softcap": {"softcap": 2.0},
    "tree": {"masks": (("tree", "branches"),)},
    "positions": {"positions": "any"},
    "moved": {"check": "moved"},
    "alone": {"check": "alone"},
    "float32": {"dtype": "float32"},
    "two_heads_of_keys": {"kv_heads": 2, "heads": 24},
    "apart": {"pool": "heads_first"},
}


def options() -> list[Case]:
    """What masks and options there are beside long keys that several blocks have."""
    shape: Fields = {"batch": 3, "heads": 16, "q_rows": 3, "kv_rows": 210}
    return latent("option", OPTIONS, **shape, kv_lengths=(210, 12, 150))


def packed() -> list[Case]:
    """Chunks and single rows in one call."""
    rows: dict[str, Fields] = {
        "chunks": {"q_packed": (1, 30, 1, 7), "kv_lengths": (200, 64, 1, 130), "kv_rows": 200},
        "tail": {"q_packed": (2, 0, 1), "q_tail": 3, "kv_lengths": (90, 5, 0), "kv_rows": 90},
    }
    return latent("packed", rows, heads=8)


CASES = shapes() + residues() + options() + packed()
