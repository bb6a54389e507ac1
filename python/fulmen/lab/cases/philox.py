# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The random numbers of dropout: Philox4x32-10, drawn for each (batch, head, q_row, kv_row).

The pattern follows from positions alone, so no tile size, backend or layout can change it. The
counter is (kv_row / 8, q_row, batch * heads + head, offset), the key the 64-bit seed; the 128 bits
are eight 16-bit numbers, number kv_row % 8 decides (low half of word 0 first). Method: Salmon et
al., Parallel random numbers: as easy as 1, 2, 3 (2011); known answers: tests/cases/test_philox.py.
"""

from __future__ import annotations

import math

import numpy as np

from .arrays import Array

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key each round: golden ratio, sqrt(3) - 1
ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)


def philox4x32(counter: Array, key: tuple[int, int]) -> Array:
    """Ten rounds of Philox on counters.

    Args:
        counter: (..., 4) 32-bit words, in any integer type.
        key: two 32-bit words.

    Returns:
        (..., 4) uint64, each below 2^32.
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter).astype(np.uint64), -1, 0)
    k0, k1 = key
    shift = np.uint64(32)
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # below 2^64: no overflow
        c0, c1, c2, c3 = (
            (right >> shift) ^ c1 ^ np.uint64(k0),
            right & WORD,
            (left >> shift) ^ c3 ^ np.uint64(k1),
            left & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def threshold(dropout_p: float) -> int:
    """The t of "dropped when u < t": dropout_p as a multiple of 1 / 65536, rounded."""
    return math.floor(dropout_p * 65536 + 0.5)


def drop_factors(
    dropout_p: float, rng: tuple[int, int], plane: int, q_rows: int, kv_rows: int
) -> Array:
    """What each probability of one head is multiplied by: 0, or 1 over the share that is kept.

    Args:
        dropout_p: the probability that a pair is dropped, 0 to 1.
        rng: (seed, offset).
        plane: batch * heads + head.
        q_rows: number of rows.
        kv_rows: number of columns.

    Returns:
        (q_rows, kv_rows) float64.
    """
    t = threshold(dropout_p)
    if t == 0:
        return np.ones((q_rows, kv_rows))
    if t == 65536:
        return np.zeros((q_rows, kv_rows))
    seed, offset = rng
    num_groups = (kv_rows + 7) // 8
    counter = np.zeros((q_rows, num_groups, 4), np.uint64)
    counter[..., 0] = np.arange(num_groups, dtype=np.uint64)
    counter[..., 1] = np.arange(q_rows, dtype=np.uint64)[:, None]
    counter[..., 2] = plane
    counter[..., 3] = offset
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
    u = halves.reshape(q_rows, num_groups * 8)[:, :kv_rows]
    return np.where(u < t, 0.0, 65536 / (65536 - t))
