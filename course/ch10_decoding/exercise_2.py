# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 10.2: rotary embeddings: products of rows know the distance of their positions alone."""

from __future__ import annotations

from typing import Any

Array = Any  # of NumPy


def rotated(x: Array, positions: Array, base: float = 10000.0) -> Array:
    """Rows, each rotated by its position.

    Numbers i and i + dim / 2 of a row are the coordinates of a point, which is turned by the angle
    position * base^(-2 i / dim), from the first axis to the second.

    Args:
        x: (row, dim), dim even.
        positions: (row,)
        base: of the angles.
    """
    raise NotImplementedError
