# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Options that are one number or word, and what those of them that change scores mean.

A case and the problem made of it have them alike (case.Case, visible.Options). The score modifier
is defined here once more, independent of the library: the oracle, its error rule and the naive way
apply it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Scalars:
    """As in fulmen.attention."""

    scale: float | None = None  # None: 1 / sqrt(max(dim, 1))
    softcap: float = 0.0  # 0: off
    causal: bool = False
    alignment: str = "bottom_right"  # or top_left


def modified(s: Array, options: Any) -> tuple[Array, Array]:
    """Scores behind the modifier, before bias and slopes; and d modified(x) / d x."""
    if not options.softcap:
        return s, np.ones_like(s)
    cap = s.dtype.type(options.softcap)
    t = np.tanh(s / cap)
    return cap * t, 1 - t * t


def modified_magnitude(s: Array, options: Any) -> Array:
    """From |x| the most that |modified(x)| may be: the modifier keeps the absolute error of x."""
    return np.minimum(s, options.softcap) if options.softcap else s
