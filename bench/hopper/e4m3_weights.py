# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What weights of e4m3 and a tensor core's sums of them do to o, simulated: NumPy, no GPU.

Scores of a normal distribution, values of e4m3. First sums in float64: what differs from the truth
is the weights and the sum that o is divided by. Then sums of 14 bits, over some keys at a time. One
line a spread of the scores and way: the rms error of o relative to o, and its mean relative to the
mean |o|.

    python bench/hopper/e4m3_weights.py
"""

from __future__ import annotations

from itertools import product

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


KEPT_BITS = 13  # behind the leading one of a sum, and behind the largest exponent of its terms
DEPTH = 32  # products that a tensor core adds up at once


def exponents(x: Array) -> NDArray[np.intp]:
    """Of the leading bits; of 0 that of the smallest e4m3."""
    return np.frexp(np.where(x == 0, 2.0**-6, np.abs(x)))[1] - 1


def added(o: Array, weights: Array, v: Array) -> Array:
    """o + weights v as a tensor core adds products of e4m3: src/emulator/tensor_core.h."""
    of_weights, of_values = (np.maximum(exponents(x), -6) for x in (weights, v))
    for k in range(0, weights.shape[1], DEPTH):
        part = slice(k, k + DEPTH)
        products = weights[:, part, None] * v[None, part]
        largest = of_weights[:, part, None] + of_values[None, part]
        largest = np.where(products == 0, -100, largest).max(axis=1)
        largest = np.maximum(largest, np.where(o == 0, -100, exponents(o)))
        unit = np.ldexp(1.0, largest - KEPT_BITS)
        o = (np.trunc(products / unit[:, None]).sum(axis=1) + np.trunc(o / unit)) * unit
        unit = np.ldexp(1.0, exponents(o) - KEPT_BITS)
        o = np.trunc(o / unit) * unit
    return np.asarray(o)


def by_blocks(x: Array, v: Array, rounds: bool, keys: int = 0, exact: bool = True) -> Array:
    """o as the kernel has it: the first 128 keys set what is subtracted, and the maximum is 2^4.

    Where a thread's weights of a later block sum to more than 448, everything is divided by the
    power of two that makes the sum of its row in the block less than 256. keys: that a tensor core
    adds up before they are added in float64; 0: none. exact: o is divided by the sum of weights
    before they are rounded.
    """
    shift = x[:, :128].max(axis=1) - 4
    sums, o = np.zeros(len(x)), np.zeros((len(x), v.shape[1]))
    part = np.zeros_like(o)
    for first in range(0, x.shape[1], 128):
        weights = np.exp2(x[:, first : first + 128] - shift[:, None])
        of_threads = weights.reshape(len(x), 16, 4, 2).sum(axis=(1, 3)).max(axis=1)
        if first:
            outgrown = (of_threads > 448).reshape(-1, 16).any(axis=1).repeat(16)
            drop = np.floor(np.log2(weights.sum(axis=1) / 256)) + 1
            factor = np.exp2(-np.where(outgrown, np.maximum(drop, 0), 0))
            shift -= np.log2(factor)
            weights, sums = weights * factor[:, None], sums * factor
            o, part = o * factor[:, None], part * factor[:, None]
        rounded = (nearest if rounds else cut_off)(np.log2(weights))
        values = v[first : first + 128]
        part = added(part, rounded, values) if keys else rounded @ values
        if not keys or (first + 128) % keys == 0:
            o, part = o + part, np.zeros_like(o)
        sums += (weights if exact else rounded).sum(axis=1)
    return np.asarray(o / sums[:, None])


def shown(words: str, o: Array, truth: Array) -> None:
    """One line."""
    rms = np.sqrt(((o - truth) ** 2).mean() / (truth**2).mean())
    print(f"{words} {rms:.5f} {(o - truth).mean() / abs(truth).mean():+.5f}", flush=True)


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
            shown(f"sd {spread} keys {keys} mean of v {mean} {name:24s}", o, truth)
    sums_of_14_bits(random)


def sums_of_14_bits(random: np.random.Generator) -> None:
    """How many keys a tensor core may add up, and by which sum o is divided."""
    for spread, mean in ((1, 2.0), (2, 2.0), (3, 2.0), (1, 0.5), (1, 0.0)):
        scores = random.standard_normal((16, 65536)) * spread * np.log2(np.e)
        v = (random.standard_normal((65536, 8)) + mean).astype(E4M3).astype(np.float64)
        weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
        truth = weights @ v / weights.sum(axis=1, keepdims=True)
        for rounds, exact, keys in product((False, True), (True, False), (0, 128, 512, 2048)):
            words = f"{'nearest' if rounds else 'cut off'}, {'exact' if exact else 'rounded'} sum"
            o = by_blocks(scores, v, rounds, keys, exact)
            shown(f"sd {spread} mean of v {mean} {words}, {keys:4d} keys", o, truth)


if __name__ == "__main__":
    main()
