# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of 8 bits: what the numbers of a problem are stored as, and the scales beside them.

The oracle knows nothing of it: the problem has the values, scale times stored, exact in float64.
Scales are the largest magnitude of what shares one over the largest number of the type, as a cache
would have them; for no scales at all the numbers are stored as they are. Called by problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Array, Stored, dtype_of

MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SCALES = ("", "tensor", "head", "row")
CHANNEL = "channel"  # of v one for each dim of a head, of the others one for each head
# What becomes of some scales, numbers stay as they are.
ODD: dict[str, Callable[[Array], Any]] = {
    "zero": lambda scale: 0.0,
    "negative": lambda scale: -scale,
    "infinite": lambda scale: np.where(np.arange(scale.size) % 2, -np.inf, np.inf),
    "nan": lambda scale: np.nan,
    "far": lambda scale: scale * np.float32(2.0**60),
}


def stored(x: Array, name: str, dtype: str, scales: str) -> Stored:
    """Numbers of q, k or v as a cache of that type has them, with scales by a word of SCALES.

    Or by CHANNEL. After the word may stand a name of them and a word of ODD: "row v far".
    """
    scales, _, odd = scales.partition(" ")
    scale: Any = None
    if scales:
        of_head = tuple(axis for axis in range(x.ndim) if axis != x.ndim - 3)
        axes = {"tensor": tuple(range(x.ndim)), "row": (x.ndim - 1,), CHANNEL: of_head[:-1]}
        largest = np.abs(x).max(axis=axes.get(scales, of_head), keepdims=True, initial=0.0)
        scale = np.where(largest > 0, largest / MOST[dtype], 1.0).astype(np.float32)
        scale = scale if scales == "row" else scale.reshape(scale.shape[-3:])
    ratio = x * 8 if scale is None else x / scale
    ratio = np.clip(ratio, -MOST[dtype], MOST[dtype])
    ratio = np.rint(ratio) if dtype == "int8" else ratio
    if odd and odd.split()[0] == name:
        some = scale.reshape(-1)[scale.size // 2 :: 7]
        some[...] = ODD[odd.split()[1]](some)
    return Stored(ratio.astype(dtype_of(dtype)), scale)


def plant_nan(kept: Stored, values: Array) -> None:
    """Makes NaN of what is NaN among the values; of integers, by the scale of the row."""
    dirty = np.isnan(values)
    if kept.numbers.dtype != np.int8:
        kept.numbers[dirty] = np.nan
    elif dirty.any():
        if not kept.has_rows or not (dirty.any(axis=-1) == dirty.all(axis=-1)).all():
            raise ValueError("int8 has no NaN: only whole rows with scales of their own can be")
        assert kept.scale is not None
        kept.scale[dirty.any(axis=-1)] = np.nan
