# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits of fulmen.quantise, and fulmen.hadamard, against their definition in float64.

x is the q of a case. Each dtype, group of scales and way to a constant: the constant is the mean of
the sample or 0, a scale what its group's largest number asks for, and a value within half a step of
its type. Then what a cache does: rows that come later take the constant and the scales that are
there. Errors are relative to what each allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

import fulmen

from .arrays import Array
from .case import Case
from .placement import Host, OnGpu
from .quantised import MOST
from .visible import Problem

Measured = Iterator[tuple[float, str]]
STEPS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17), "int8": (0, 0.5)}
DIGITS = {"float32": 20, "float16": 11, "bfloat16": 8}  # of the rotation: sums in float32
SAMPLED = 256
WAYS = tuple(product((False, True), (None, "mean")))  # rotated, constant


def judged(case: Case, problem: Problem, memory: Host | OnGpu) -> Measured:
    """The largest error of each array of each call, relative to what it may be."""
    x = problem.q
    rng = np.random.default_rng(len(case.name))
    lengths = rng.integers(0, case.q_rows + 1, case.batch).astype(case.offsets)
    for n, (dtype, per) in enumerate(product(MOST, ("tensor", "head", "row", "channel"))):
        rotate, constant = WAYS[n % len(WAYS)]
        given = lengths if n % 2 else None
        how: dict[str, Any] = {"rotate": rotate, "lengths": given}
        found = memory.quantise(x, dtype, per=per, constant=constant, headroom=1 + n % 3, **how)
        what = f"{dtype} per {per}" + (" rotated" if rotate else "")
        exact = np.asarray(x, np.float64)
        if given is not None:
            exact[np.arange(case.q_rows) >= given[:, None, None] + np.zeros((1, x.shape[1], 1))] = 0
        if constant is not None:
            yield of_constant(exact, given, found.constant), f"constant of {what}"
            exact = less_constant(exact, given, found.constant)
        exact = rotated(exact) if rotate else exact
        yield of_scales(exact, per, found.scale, MOST[dtype] / (1 + n % 3)), f"scales of {what}"
        yield of_values(exact, found, dtype), f"values of {what}"
        scale, c = np.asarray(found.scale), found.constant
        c = None if c is None else np.asarray(c)
        later = memory.quantise(x, dtype, constant=c, scale=scale, **how)
        same = np.asarray(later.values).view(np.uint8) == np.asarray(found.values).view(np.uint8)
        yield 0.0 if same.all() else np.inf, f"values of {what} by scales that are there"
    turned = np.asarray(memory.hadamard(x), np.float64)
    allowed = 2.0 ** -DIGITS[case.dtype] * np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    error = np.abs(turned - rotated(np.asarray(x, np.float64))).max(axis=-1, initial=0.0)
    yield worst(error, allowed), "hadamard"


def worst(error: Array, allowed: Array) -> float:
    """The largest of errors relative to what they may be."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / allowed)
    return float(ratio.max(initial=0.0))


def rotated(x: Array) -> Array:
    """Hadamard's matrix on parts of rows, by its definition: signs by common bits."""
    part = x.shape[-1] & -x.shape[-1]
    index = np.arange(part)
    common = index[:, None] & index
    bits = sum((common >> bit) & 1 for bit in range(part.bit_length()))
    signs: Array = np.where(np.asarray(bits) % 2, -1.0, 1.0)
    turned: Array = x.reshape(*x.shape[:-1], -1, part) @ signs / np.sqrt(part)
    return turned.reshape(x.shape)


def less_constant(x: Array, lengths: Any, constant: Array) -> Array:
    """Rows that count, less their constant."""
    made: Array = x - np.asarray(constant, np.float64)
    if lengths is not None:
        rows = np.arange(x.shape[2]) >= lengths[:, None, None] + np.zeros((1, x.shape[1], 1))
        made[rows] = 0
    return made


def of_constant(x: Array, lengths: Any, constant: Array) -> float:
    """The constant of each head against the mean of the sample of its rows."""
    ratio = 0.0
    for b, h in np.ndindex(x.shape[:2]):
        rows = x.shape[2] if lengths is None else int(lengths[b])
        count = min(rows, SAMPLED)
        sample = x[b, h, np.arange(count) * rows // max(count, 1)]
        mean = sample.sum(axis=0) / max(count, 1)
        gain = 4 * count * (mean**2).sum() - (sample**2).sum()
        if abs(gain) < 1e-4 * (sample**2).sum():
            continue  # either is right
        expected = mean if gain >= 0 else np.zeros_like(mean)
        size = np.abs(sample).mean(axis=0) if count else np.ones_like(mean)
        error = np.abs(np.asarray(constant[b, h, 0], np.float64) - expected)
        ratio = max(ratio, worst(error, 2.0**-18 * (size + np.abs(expected))))
    return ratio


def of_scales(x: Array, per: str, scale: Array, most: float) -> float:
    """Scales against the largest numbers of their groups."""
    axes = {"tensor": (0, 1, 2, 3), "head": (2, 3), "row": (3,), "channel": (2,)}[per]
    largest = np.abs(x).max(axis=axes, keepdims=True, initial=0.0) / most
    expected = np.maximum(largest, 2.0**-100)
    return worst(np.abs(np.asarray(scale, np.float64) - expected), 2.0**-18 * expected)


def of_values(x: Array, found: Any, dtype: str) -> float:
    """Values against x over its scale: half a step of the type."""
    relative, least = STEPS[dtype]
    exact = x / np.asarray(found.scale, np.float64)
    error = np.abs(np.asarray(found.values, np.float64) - exact)
    return worst(error, (relative + 2.0**-16) * np.abs(exact) + least + 2.0**-16)


def takes(implementation: str) -> None:
    """Raises UnsupportedError where an implementation has none of its own."""
    if implementation not in ("auto", "tiled", "simt"):
        raise fulmen.UnsupportedError(
            "each backend has one way to numbers of 8 bits: with `tiled` and with `simt`"
        )
