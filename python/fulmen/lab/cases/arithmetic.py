# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic in which the oracle computes: the type, the rounding and the order of its sums.

`reference(t)` is a wider type than t: float64 for 16-bit and float32 inputs, long double for
float64. `plain(t)` is what semantics.md measures errors against: float32 (float64 for float64),
sums in natural order, 16-bit tensors rounded wherever a plain implementation stores them. Called
by oracle and magnitude only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import HAS_LONG_DOUBLE, Array, dtype_of, is_16bit


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are held, rounded and summed."""

    work: np.dtype[Any]  # the type of every number between the inputs and the outputs
    storage: np.dtype[Any] | None  # what `round` rounds to; None: it does nothing
    natural_order: bool  # sums run from the first term to the last, one rounding a term
    tf32: bool = False  # factors of products of matrices are rounded to tf32
    eight_bits: bool = False  # products as tensor cores make them of e4m3: see below
    rounds_inputs: bool = False  # and q, k and v become e4m3 before: see below

    def cast(self, x: Array) -> Array:
        """X in the type of the work."""
        return np.asarray(x).astype(self.work)

    def number(self, x: float) -> Any:
        """One number in the type of the work."""
        return self.work.type(x)

    def round(self, x: Array) -> Array:
        """R(x): through the type of the inputs."""
        return x if self.storage is None else x.astype(self.storage).astype(self.work)

    @property
    def eps(self) -> float:
        """From 1 to the next number of its sums."""
        return 2.0**-KEPT_BITS if self.eight_bits else float(np.finfo(self.work).eps)

    @property
    def weights(self) -> np.dtype[Any] | None:
        """What probabilities are rounded to before they are multiplied; None: they are not."""
        return dtype_of("float8_e4m3fn") if self.eight_bits else self.storage

    def round_weights(self, x: Array) -> Array:
        """Weights, 1 being the largest of a row, rounded to their type; e4m3 times 2^8."""
        if not self.eight_bits:
            return self.round(x)
        return np.asarray((x * 256).astype(self.weights).astype(self.work) / 256)

    def scores(self, q: Array, k: Array) -> Array:
        """The product of q and k transposed; of e4m3 what sums of 14 bits leave of it."""
        if not self.eight_bits:
            return self.dot(q, k.T)
        if self.rounds_inputs:
            q, k = rounded_queries_and_keys(q, k)
        return np.stack([scores_of_8_bits(row, k) for row in q]) if len(q) else self.dot(q, k.T)

    def values(self, v: Array) -> Array:
        """v as it is multiplied."""
        return rounded_values(v) if self.rounds_inputs else v

    def round_as(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """X through another type, where the arithmetic rounds at all."""
        rounds = self.natural_order and dtype.itemsize < self.work.itemsize
        return x.astype(dtype).astype(self.work) if rounds else x

    def sum_rows(self, x: Array) -> Array:
        """The sum of each row: (m, n) -> (m,)."""
        if not self.natural_order or x.shape[1] == 0:
            return np.asarray(x.sum(axis=1, dtype=self.work))
        return np.asarray(np.add.accumulate(x, axis=1)[:, -1])

    def dot(self, a: Array, b: Array, visible: Array | None = None) -> Array:
        """The product of a (m, n) and b (n, d), to which a pair that is not visible adds nothing.

        Not even when b is NaN: rows of b that are not finite are kept out of the product and added
        with the mask.
        """
        if self.tf32:
            a, b = as_tf32(a), as_tf32(b)
        if self.natural_order:
            return self._dot_in_order(a, b, visible)
        if visible is None:
            return np.asarray(a @ b)
        dirty = dirty_rows(b)
        out: Array = a @ np.where(dirty[:, None], self.number(0), b)
        for n in np.flatnonzero(dirty):
            out += np.where(visible[:, n, None], a[:, n, None] * b[n], self.number(0))
        return out

    def _dot_in_order(self, a: Array, b: Array, visible: Array | None) -> Array:
        out = np.zeros((a.shape[0], b.shape[1]), self.work)
        term = np.empty_like(out)
        dirty = dirty_rows(b)
        for n in range(a.shape[1]):
            np.multiply(a[:, n, None], b[n], out=term)
            if visible is not None and dirty[n]:
                term[~visible[:, n]] = 0
            out += term
        return out

    def sum_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The reverse of broadcasting: x summed down to `shape`."""
        full = (1,) * (x.ndim - len(shape)) + shape
        axes = [a for a in range(x.ndim) if full[a] == 1]
        kept = [a for a in range(x.ndim) if full[a] != 1]
        rows = int(np.prod([x.shape[a] for a in kept], dtype=np.int64))
        count = int(np.prod([x.shape[a] for a in axes], dtype=np.int64))
        return self.sum_rows(x.transpose(kept + axes).reshape(rows, count)).reshape(shape)


DEPTH_OF_8_BITS = 32  # products of e4m3 that a tensor core adds up at once
KEPT_BITS = 13  # of them behind the largest exponent among them and the sum before


def scores_of_8_bits(row: Array, k: Array) -> Array:
    """k (n, d) times a row of q, as Hopper's tensor cores add up products of e4m3 in float32.

    32 products and the sum so far are cut off, towards zero, 13 bits behind the largest of them,
    and so is their sum behind its own leading bit.
    """
    s = np.zeros((len(k), 1))
    for d in range(0, len(row), DEPTH_OF_8_BITS):
        part = slice(d, d + DEPTH_OF_8_BITS)
        terms = np.concatenate([s, row[part].astype(float) * k[:, part]], axis=1)
        s = cut_off(cut_off(terms, abs(terms).max(axis=1)).sum(axis=1, keepdims=True))
    return s[:, 0].astype(row.dtype)


def cut_off(x: Array, largest: Array | None = None) -> Array:
    """Numbers towards zero, to 13 bits behind the leading one, or behind that of `largest`."""
    _, exponent = np.frexp(abs(x) if largest is None else largest[:, None])
    unit = np.ldexp(1.0, exponent - 1 - KEPT_BITS)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), np.trunc(x / unit) * unit, x)


# What precision "fp8" makes of 16-bit q, k and v of a head: the formula of src/kernels/quantise
# over all keys that there are, with the numbers scaled back, so that it stands wherever those of
# the problem do.
LARGEST_OF_8_BITS = 448.0
SAMPLED_VALUE = 56.0


def rotated(x: Array) -> Array:
    """Hadamard's orthogonal matrix on each part of the rows: as wide as a power of two divides."""
    width = x.shape[1] & -x.shape[1]
    y = x.reshape(len(x), -1, width)
    distance = 1
    while distance < width:
        pairs = y.reshape(len(x), -1, width // (2 * distance), 2, distance)
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
        y = np.stack([a + b, a - b], axis=3).reshape(len(x), -1, width)
        distance *= 2
    return np.asarray(y.reshape(x.shape) / np.sqrt(width))


def rounded_to_8_bits(x: Array, scale: float) -> Array:
    """To e4m3 times a scale."""
    if not scale > 0 or not np.isfinite(scale):
        return x
    numbers = np.clip(x / scale, -LARGEST_OF_8_BITS, LARGEST_OF_8_BITS).astype(
        dtype_of("float8_e4m3fn")
    )
    return np.asarray(numbers.astype(x.dtype) * x.dtype.type(scale))


def rounded_queries_and_keys(q: Array, k: Array) -> tuple[Array, Array]:
    """q and k (rows, dim), each row rotated and rounded; of k without what all keys have.

    Their products are those of q and k to rounding: what was taken off comes back.
    """
    finite = k[np.isfinite(k).all(axis=1)]
    if q.shape[1] == 0 or not len(finite) or not len(q):
        return q, k
    mean = finite.mean(axis=0)
    if 4 * (mean**2).sum() < (finite**2).sum(axis=1).mean():
        mean = np.zeros_like(mean)

    def of_norms(x: Array) -> Array:
        norms = np.sqrt((x**2).sum(axis=1))
        norms = norms[np.isfinite(norms)]
        return rotated(
            rounded_to_8_bits(rotated(x), float(norms.max(initial=0)) / LARGEST_OF_8_BITS)
        )

    return of_norms(q), of_norms(k - mean) + mean


def rounded_values(v: Array) -> Array:
    """v (rows, dim), rounded."""
    most = float(abs(v[np.isfinite(v)]).max(initial=0))
    return rounded_to_8_bits(v, most / SAMPLED_VALUE)


def as_tf32(x: Array) -> Array:
    """Float32 numbers rounded to 11 significant bits, ties away from zero, as a GPU does it."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def dirty_rows(x: Array) -> Array:
    """Which rows hold NaN or infinity."""
    return np.asarray(~np.isfinite(x).all(axis=1))


def reference(dtype: str) -> Arithmetic:
    """The arithmetic that says what is right for inputs of this type.

    Raises:
        NotImplementedError: float64 inputs on a machine whose long double is no wider.
    """
    if dtype != "float64":
        return Arithmetic(np.dtype(np.float64), None, False)
    if not HAS_LONG_DOUBLE:
        raise NotImplementedError("long double is no wider than float64 on this machine")
    return Arithmetic(np.dtype(np.longdouble), None, False)


def plain(dtype: str, precision: str = "") -> Arithmetic:
    """The arithmetic of a plain implementation for inputs of this type.

    "tf32" makes a difference, "e4m3": q, k and v of 8 bits on tensor cores, and "fp8": those of 16
    bits that become e4m3; "3xtf32" is judged as float32 is.
    """
    storage = dtype_of(dtype)
    work = np.dtype(np.float64 if dtype == "float64" else np.float32)
    stored = storage if is_16bit(storage) else None
    of_8_bits = precision in ("e4m3", "fp8")
    return Arithmetic(work, stored, True, precision == "tf32", of_8_bits, precision == "fp8")
