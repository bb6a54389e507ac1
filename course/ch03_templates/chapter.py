# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 3: what kernels know when they are compiled, and what that leaves to be done."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from course.device import Array
from course.lesson import EPSILON, Lesson
from ml_dtypes import bfloat16

TITLE = "C++ templates and constexpr, as kernels use them"
HERE = Path(__file__).parent
COLUMNS = 256
ELEMENTS = {"kFloat32": np.float32, "kFloat16": np.float16, "kBFloat16": bfloat16}


def run(lesson: Lesson) -> None:
    """One text, compiled three times."""
    for dtype, causal in (("kFloat32", False), ("kFloat16", False), ("kFloat16", True)):
        softmax(lesson, dtype, causal)


def softmax(lesson: Lesson, dtype: str, causal: bool) -> None:
    """The kernel of one config."""
    n, device, element = COLUMNS, lesson.device, ELEMENTS[dtype]
    scores = lesson.draw(n, n).astype(element)
    s, p = device.array("s", scores), device.empty("p", (n, n), element)
    kernel = device.compile(HERE / "softmax.cu", DTYPE=dtype, COLUMNS=n, CAUSAL=int(causal))
    launch = partial(kernel.launch, n // 4, 128, 0, s, p)
    found = lesson.run(launch, clear=(p,))
    _check(lesson, p.get(), scores, causal)
    lesson.head(f"{dtype}, {'causal' if causal else 'full'}")
    size = np.dtype(element).itemsize
    lanes = 16 // size
    # Causal: the vectors of row i that begin at or before column i.
    vectors = sum(i // lanes + 1 if causal else n // lanes for i in range(n))
    lesson.compare("bytes loaded", found.loaded("s"), 16 * vectors)
    lesson.compare("bytes stored", found.stored("p"), size * n * n)
    lesson.compare("exponentials", found.exponentials, n * n)
    lesson.compare("shuffles of threads", found.shuffles, 10 * 32 * n)
    lesson.time("softmax", launch, 0, 2 * size * n * n)


def _check(lesson: Lesson, got: Array, scores: Array, causal: bool) -> None:
    """Against float64: each number within a rounding to its type, and 32 roundings of float32.

    exp2 is off by 2^-22 at most, its argument, up to 15 in magnitude, by 8 roundings, a sum by 13,
    one for each addition on its way.
    """
    x = scores.astype(np.float64)
    if causal:
        x = np.where(np.tri(len(x), dtype=bool), x, -math.inf)
    truth = np.exp(x - x.max(axis=1, keepdims=True))
    truth /= truth.sum(axis=1, keepdims=True)
    kind = np.finfo(got.dtype)
    allowed = truth * (float(kind.eps) + 32 * EPSILON) + float(kind.smallest_subnormal)
    lesson.check_within("P", got, truth, allowed)


def test_of_specialisation(lesson: Lesson, path: Path) -> None:
    """Exercise 1: a third type."""
    device = lesson.device
    for dtype, element in ELEMENTS.items():
        x = lesson.draw(64).astype(element)
        source, target = device.array("x", x), device.empty("y", 64, element)
        kernel = device.compile(path, DTYPE=dtype)
        lesson.run(partial(kernel.launch, 2, 32, 0, source, target), clear=(target,))
        lesson.check_equal(f"y in {dtype}", target.get(), x + x)


def test_of_groups(lesson: Lesson, path: Path) -> None:
    """Exercise 2: sums of groups of lanes."""
    device = lesson.device
    for lanes in (2, 4, 8, 16, 32):
        x = np.arange(32, dtype=np.float32) ** 2
        source, target = device.array("x", x), device.empty("y", 32)
        kernel = device.compile(path, LANES=lanes)
        found = lesson.run(partial(kernel.launch, 1, 32, 0, source, target), clear=(target,))
        expected = np.repeat(x.reshape(-1, lanes).sum(axis=1), lanes)
        lesson.check_equal(f"y in groups of {lanes}", target.get(), expected)
        steps = found.shuffles // 32
        lesson.require(2**steps == lanes, f"groups of {lanes} took {steps} shuffles")


EXERCISES = (test_of_specialisation, test_of_groups)
