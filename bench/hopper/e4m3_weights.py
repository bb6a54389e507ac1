# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the rounding of softmax weights to e4m3 does to o, simulated: NumPy alone, no GPU.

Scores of a normal distribution, values of e4m3, sums in float64: what differs from the truth is the
weights and the sum that o is divided by. One line a spread of the scores and way of rounding:
the rms error of o relative to o, and its mean relative to the mean |o|.

    python bench/hopper/e4m3_weights.py
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
E4M3 = ml_dtypes.float8_e4m3fn


def nearest(x: Array) -> Array:
    """2^x, rounded to the nearest."""
    return np.exp2(x).astype(E4M3).astype(np.float64)


def in_the_logarithm(x: Array) -> Array:
    """2^x by the byte 8 (x + 7), as the kernel rounds."""
    codes = np.clip(np.rint(8 * (x + 7)), 0, 126)
    return np.asarray(codes.astype(np.uint8).view(E4M3).astype(np.float64))


def cut_off(x: Array) -> Array:
    """2^x towards 0, times what that takes off on average."""
    p = 1.0436 * np.exp2(x)
    unit = np.exp2(np.maximum(np.floor(np.log2(p)), -6) - 3)
    return np.asarray(np.floor(p / unit) * unit)


def by_blocks(x: Array, v: Array, rounds: bool) -> Array:
    """o as the kernel has it: the first 128 keys set what is subtracted, and the maximum is 2^4.

    Where a thread's weights of a later block sum to more than 448, everything is divided by the
    power of two that makes the sum of its row in the block less than 256.
    """
    shift = x[:, :128].max(axis=1) - 4
    sums, o = np.zeros(len(x)), np.zeros((len(x), v.shape[1]))
    for first in range(0, x.shape[1], 128):
        weights = np.exp2(x[:, first : first + 128] - shift[:, None])
        of_threads = weights.reshape(len(x), 16, 4, 2).sum(axis=(1, 3)).max(axis=1)
        if first:
            outgrown = (of_threads > 448).reshape(-1, 16).any(axis=1).repeat(16)
            drop = np.floor(np.log2(weights.sum(axis=1) / 256)) + 1
            factor = np.exp2(-np.where(outgrown, np.maximum(drop, 0), 0))
            shift -= np.log2(factor)
            weights, sums, o = weights * factor[:, None], sums * factor, o * factor[:, None]
        exponents = np.log2(weights)
        rounded = nearest(exponents) if rounds else cut_off(exponents)
        o += rounded @ v[first : first + 128]
        sums += weights.sum(axis=1)
    return np.asarray(o / sums[:, None])


def main() -> None:
    """Prints the table of docs/design/forward_sm90.md."""
    random = np.random.default_rng(2)
    for spread, keys, mean in ((1, 16384, 0), (2, 16384, 0), (3, 16384, 0), (4, 16384, 0),
                               (1, 65536, 2), (3, 65536, 2)):  # fmt: skip
        scores = random.standard_normal((128, keys)) * spread * np.log2(np.e)
        v = (random.standard_normal((keys, 64)) + mean).astype(E4M3).astype(np.float64)
        x = scores - scores.max(axis=1, keepdims=True)
        exact = np.exp2(x)
        truth = exact @ v / exact.sum(axis=1, keepdims=True)
        ways = {
            "nearest, exact sum": (nearest(x + 7), np.exp2(x + 7)),
            "nearest, rounded sum": (nearest(x + 7),) * 2,
            "in the logarithm": (in_the_logarithm(x + 7),) * 2,
            "cut off, maximum at 2^4": (cut_off(x + 4), np.exp2(x + 4)),
        }
        found = {n: w @ v / summed.sum(axis=1, keepdims=True) for n, (w, summed) in ways.items()}
        found["by blocks, cut off"] = by_blocks(scores, v, rounds=False)
        found["by blocks, to nearest"] = by_blocks(scores, v, rounds=True)
        for name, o in found.items():
            error = o - truth
            rms = np.sqrt((error**2).mean() / (truth**2).mean())
            bias = error.mean() / abs(truth).mean()
            print(f"sd {spread} keys {keys} mean of v {mean} {name:24s} {rms:.4f} {bias:+.5f}")


if __name__ == "__main__":
    main()
