# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 11.1."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # of NumPy


def absorbed(q: Array, q_rotated: Array, W_k: Array) -> Array:
    """q . (W_k c) = (W_k^T q) . c"""
    return np.concatenate([np.einsum("hd,hdl->hl", q, W_k), q_rotated], axis=1)


def expanded(o: Array, W_v: Array) -> Array:
    """A weighted sum of W_v c is W_v of the weighted sum."""
    return np.einsum("hdl,hl->hd", W_v, o)


def intensity(heads: int, latent: int, rotated: int) -> float:
    """Two products, over latent + rotated and over latent; two bytes a number, read once."""
    return 2 * heads * (latent + rotated + latent) / (2 * (latent + rotated))
