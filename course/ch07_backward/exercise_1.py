# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 7.1: the gradients in NumPy, block by block; nothing of rows x rows is held."""

from __future__ import annotations

from typing import Any

Array = Any  # of NumPy


def gradients(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, scale: float, block: int
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of o = softmax(scale q k^T) v.

    Args:
        q, k, v, o, do: (row, dim)
        lse: (row), the logarithm of the sum of exp(scale q k^T) of a row.
        scale: of the scores.
        block: no array here may have more than rows x max(block, dim) numbers.
    """
    raise NotImplementedError
