# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 7.1: a block of keys has its dk and dv whole, and adds its share to dq."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # of NumPy


def gradients(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, scale: float, block: int
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of o = softmax(scale q k^T) v, some keys at a time."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (do * o).sum(axis=1, keepdims=True)
    for first in range(0, len(k), block):
        keys = slice(first, first + block)
        p = np.exp(scale * q @ k[keys].T - lse[:, None])
        ds = p * (do @ v[keys].T - delta)
        dv[keys] = p.T @ do
        dk[keys] = scale * ds.T @ q
        dq += scale * ds @ k[keys]
    return dq, dk, dv
