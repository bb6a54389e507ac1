# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Element types by name, bfloat16 included, and what their numbers weigh.

NumPy has no bfloat16 of its own: ml_dtypes lends one. Everything here takes and gives plain NumPy
arrays; the rest of the cases names types as text ("float64", "float32", "float16", "bfloat16").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = ("float64", "float32", "float16", "bfloat16")
HAS_LONG_DOUBLE = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype with this name."""
    lent = name == "bfloat16" or name.startswith("float8")
    return np.dtype(getattr(ml_dtypes, name)) if lent else np.dtype(name)


def unused(dtype: Any) -> Any:
    """What stands where nobody may look: NaN, or the largest of integers."""
    return np.iinfo(dtype).max if np.dtype(dtype).kind in "iu" else np.nan


def is_16bit(dtype: np.dtype[Any]) -> bool:
    """Whether an element takes two bytes: float16 and bfloat16."""
    return bool(dtype.itemsize == 2)


def parameter_dtype(name: str) -> np.dtype[Any]:
    """The type of lse, dlse, slopes and sinks beside tensors of type `name`."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def ulp(x: Array, dtype: np.dtype[Any]) -> Array:
    """The distance from |x| to the next number of `dtype`, in the type of x; NaN where x is not.

    Computed from the exponent, since numpy.spacing does not know every type.
    """
    finfo: Any = ml_dtypes.finfo
    info = finfo(dtype)
    _, exponent = np.frexp(np.abs(x))  # |x| = f * 2^exponent, f in [1/2, 1)
    smallest = int(info.minexp) - int(info.nmant)
    step = np.where(x == 0, smallest, np.maximum(exponent - 1 - int(info.nmant), smallest))
    return np.where(np.isfinite(x), np.ldexp(np.ones_like(x), step), np.nan)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays have the same shape, type and bytes: NaN equals NaN, -0 is not 0."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@dataclass
class Stored:
    """Of q, k or v: its numbers of 8 bits, and their scales."""

    numbers: Array
    scale: Array | None  # broadcasts to them

    @property
    def values(self) -> Array:
        """Exact, in float64; NaN where the scale is not finite."""
        values = self.numbers.astype(np.float64)
        if self.scale is None:
            return values
        return np.where(np.isfinite(self.scale), self.scale.astype(np.float64), np.nan) * values

    @property
    def has_rows(self) -> bool:
        """Whether each row has a scale."""
        return self.scale is not None and self.scale.ndim == self.numbers.ndim
