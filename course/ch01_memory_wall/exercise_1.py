# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 1.1: the arithmetic of the chapter as three functions."""


def naive_bytes(rows: int, dim: int, size: int) -> int:
    """Bytes that attention by whole matrices moves to and from global memory.

    Q, K, V and O have `rows` rows of `dim` numbers of `size` bytes, and are moved once. S and P are
    float32; each is written once and read once.
    """
    raise NotImplementedError


def intensity(flops: float, num_bytes: float) -> float:
    """Operations for each byte that is moved."""
    raise NotImplementedError


def seconds_at_least(
    flops: float, num_bytes: float, peak_flops: float, bytes_per_second: float
) -> float:
    """The time below which no kernel can be that computes and moves so much on a card.

    Arithmetic and traffic may overlap as well as they can.
    """
    raise NotImplementedError
