# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 5.1."""


def bytes_moved(rows: int, dim: int, keys: int) -> int:
    """K and V once; for each tile Q, O twice, m and l twice each."""
    once = 2 * rows * dim
    for_each_tile = rows * dim + 2 * rows * dim + 2 * 2 * rows
    return 4 * (once + rows // keys * for_each_tile)


def most_keys(dim: int, shared_bytes: int) -> int:
    """A key and its value are 2 dim numbers."""
    return shared_bytes // (2 * 4 * dim)
