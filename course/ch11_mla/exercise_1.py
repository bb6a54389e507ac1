# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 11.1: matrices that move from the cache to the queries, and what that is worth."""

from __future__ import annotations

from typing import Any

Array = Any  # of NumPy


def absorbed(q: Array, q_rotated: Array, W_k: Array) -> Array:
    """Queries for rows of a cache (c, r), such that their products are q . (W_k c) + q_rotated . r.

    Args:
        q: (head, dim)
        q_rotated: (head, rotated)
        W_k: (head, dim, latent)

    Returns:
        (head, latent + rotated)
    """
    raise NotImplementedError


def expanded(o: Array, W_v: Array) -> Array:
    """The outputs of the heads, from what attention makes of latent rows.

    Args:
        o: (head, latent), the weighted sum of rows c.
        W_v: (head, dim, latent)

    Returns:
        (head, dim), the weighted sum of W_v c.
    """
    raise NotImplementedError


def intensity(heads: int, latent: int, rotated: int) -> float:
    """Operations for each byte of a cache in 16 bits, one query a head, the cache read once."""
    raise NotImplementedError
