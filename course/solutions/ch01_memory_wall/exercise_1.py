# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 1.1."""


def naive_bytes(rows: int, dim: int, size: int) -> int:
    """Four arrays once; four passes over matrices of float32."""
    return 4 * rows * dim * size + 4 * 4 * rows * rows


def intensity(flops: float, num_bytes: float) -> float:
    """Operations for each byte."""
    return flops / num_bytes


def seconds_at_least(
    flops: float, num_bytes: float, peak_flops: float, bytes_per_second: float
) -> float:
    """The longer of the two: while one is done, so can be the other."""
    return max(flops / peak_flops, num_bytes / bytes_per_second)
