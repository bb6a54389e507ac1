# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 5.1: what FlashAttention-1 moves, and how large its tiles may be."""


def bytes_moved(rows: int, dim: int, keys: int) -> int:
    """Bytes of q, k, v, o, m and l, loaded and stored, with tiles of `keys` keys; all float32."""
    raise NotImplementedError


def most_keys(dim: int, shared_bytes: int) -> int:
    """Keys of the largest tile of float32 keys and values that so much shared memory holds."""
    raise NotImplementedError
