# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 6.3."""

ROWS = (32, 64, 128)
KEYS = (8, 16, 32, 64)
DIM = 32
FLOAT_BYTES = 4


def tile(rows: int, heads: int, multiprocessors: int, shared_bytes: int) -> tuple[int, int]:
    """K and V pass once for each block, so that the longest block loads least."""
    r = max(r for r in ROWS if heads * (rows // r) >= multiprocessors)
    c = max(c for c in KEYS if 2 * FLOAT_BYTES * c * DIM <= shared_bytes)
    return r, c
