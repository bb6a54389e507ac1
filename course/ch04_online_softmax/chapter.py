# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 4: softmax from a few keys at a time, and how often its maximum rises."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from course.device import Array, Kernel
from course.exercises import function_of
from course.lesson import EPSILON, Lesson

TITLE = "Online softmax, with its proof"
HERE = Path(__file__).parent
DIM = 64
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """Attention without a matrix, on plain scores and on scores of a thousand; then rescales."""
    kernel = lesson.device.compile(HERE / "online.cu", DIM=DIM)
    attention(lesson, kernel, "scores of about 1", 1)
    attention(lesson, kernel, "scores of about 1,000", 1000)
    _rises(lesson)


def attention(lesson: Lesson, kernel: Kernel, title: str, factor: int) -> None:
    """One head, with queries that are so many times as large."""
    n, device = (2048 if lesson.on_gpu else 128), lesson.device
    q, k, v = lesson.draw(3, n, DIM)
    q *= factor
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    o, lse = device.empty("o", (n, DIM)), device.empty("lse", n)
    attend = partial(kernel.launch, n // 4, 128, 0, *arrays, o, lse, n, LOG2_E / math.sqrt(DIM))
    found = lesson.run(attend, clear=(o, lse))
    lesson.check_attention({"o": o.get(), "lse": lse.get()}, q, k, v)
    lesson.head(title)
    lesson.compare("operations of the two products", found.flops, 4 * n * n * DIM)
    # P, and in every lane the factor exp(m - m_new) of each block of 32 keys.
    lesson.compare("exponentials", found.exponentials, n * n + n * n)
    lesson.compare("bytes of q, k, v that threads load", found.loaded(), 3 * 4 * n * n * DIM)
    lesson.compare("bytes stored: o and lse alone", found.stored(), 4 * n * (DIM + 1))
    lesson.time("attention", attend, 4 * n * n * DIM, 4 * 4 * n * DIM)


def mean_rises(scores: Array) -> float:
    """How often the running maximum of a row (row, block, key) rises, on average over the rows."""
    largest = np.maximum.accumulate(scores.max(axis=2), axis=1)
    return float(1 + (np.diff(largest, axis=1) > 0).sum(axis=1).mean())


def _rises(lesson: Lesson) -> None:
    """Keys in random order: block b has the maximum of the first b with probability 1 / b."""
    lesson.say()
    lesson.say(
        "rises of the maximum in 4,000 rows, blocks of 32 keys: mean, 1 + 1/2 + .. + 1/blocks"
    )
    points = []
    for blocks in (4, 16, 64, 256):
        found = mean_rises(lesson.draw(4000, blocks, 32))
        expected = sum(1 / b for b in range(1, blocks + 1))
        lesson.lines.append({"what": "rises", "blocks": blocks, "mean": found, "model": expected})
        lesson.say(f"  {blocks:4} blocks: {found:.3f}, {expected:.3f}")
        lesson.require(abs(found / expected - 1) < 0.05, f"{blocks} blocks: {found:.3f} rises")
        points.append((str(blocks), found))
    lesson.plot("rises by number of blocks", points)


def test_of_merge(lesson: Lesson, path: Path) -> None:
    """Exercise 1: states of blocks, merged in any order."""
    of_block, merge = function_of(path, "of_block"), function_of(path, "merge")
    rng = np.random.default_rng(1)
    for shift in (0.0, 1e6, -1e6):
        s, v = rng.standard_normal(40) * 5 + shift, rng.standard_normal((40, 3))
        p = np.exp(s - s.max())
        truth = p @ v / p.sum()
        for cuts in ([0, 40], [0, 1, 40], [0, 13, 13, 40], [0, 0, 20, 39, 40, 40]):
            states = [of_block(s[a:b], v[a:b]) for a, b in zip(cuts, cuts[1:])]
            forwards = backwards = of_block(s[:0], v[:0])
            for state in states:
                forwards = merge(forwards, state)
            for state in states[::-1]:
                backwards = merge(state, backwards)
            for m, l, O in (forwards, backwards):
                lesson.require(m == s.max(), f"blocks {cuts}: m is {m:g}, not {s.max():g}")
                lesson.require(
                    bool(np.allclose(O / l, truth, rtol=1e-9)),
                    f"blocks {cuts}, scores around {shift:g}: O / l is not right",
                )
    m, l, O = merge(of_block(s[:0], v[:0]), of_block(s[:0], v[:0]))
    lesson.require(m == -math.inf and l == 0 and not np.any(O), "no keys and no keys are no keys")


def test_of_one_pass(lesson: Lesson, path: Path) -> None:
    """Exercise 2: the sum of a row in one pass."""
    rows, columns, device = 8, 512, lesson.device
    s = 20 * lesson.draw(rows, columns)
    s[3] += 5000
    source, target = device.array("s", s), device.empty("y", rows)
    kernel = device.compile(path)
    found = lesson.run(
        partial(kernel.launch, rows, 32, 0, source, target, columns), clear=(target,)
    )
    wide = s.astype(np.float64)
    m = wide.max(axis=1)
    truth = m + np.log2(np.exp2(wide - m[:, None]).sum(axis=1))
    lesson.check_within("y", target.get(), truth, EPSILON * abs(truth) + 64 * EPSILON)
    lesson.require(
        found.loaded("s") == 4 * rows * columns,
        f"{found.loaded('s')} bytes of S were read; it has {4 * rows * columns}",
    )


EXERCISES = (test_of_merge, test_of_one_pass)
