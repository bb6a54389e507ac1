# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 10.2."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # of NumPy


def rotated(x: Array, positions: Array, base: float = 10000.0) -> Array:
    """Each pair of numbers by the matrix of a rotation."""
    half = x.shape[1] // 2
    angles = np.asarray(positions)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=1)
