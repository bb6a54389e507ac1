# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits of fulmen.quantise: see cases/rounded.py. q is what is rounded."""

from __future__ import annotations

from itertools import product

from ..case import Case
from .options import Fields, table

DTYPES = ("bfloat16", "float16", "float32")
DIMS = (128, 64, 80, 33, 256, 320, 1, 12)


def rounded() -> list[Case]:
    """Dims of whole vectors and of none, rows around a block and around the sample, strides."""
    rows: dict[str, Fields] = {}
    for n, (dim, dtype) in enumerate(product(DIMS, DTYPES)):
        rows[f"d{dim}_{dtype}"] = {
            "dim": dim, "dtype": dtype, "q_rows": (1, 70, 300, 17, 130)[n % 5],
            "inputs": ("normal", "outlier", "normal")[n % 3],
            "views": (("q", ("contiguous", "rows_first", "gapped", "dims_first")[n % 4]),),
        }  # fmt: skip
    rows["zeros"] = {"inputs": "zeros", "dim": 64, "dtype": "bfloat16", "q_rows": 40}
    fields: Fields = {"gradients": (), "check": "rounded", "batch": 2, "heads": 3}
    return table("rounded", ("quantised",), rows, **fields)


CASES = rounded()
