# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 7: the backward pass by recomputation, its five products, and dQ from all blocks."""

from __future__ import annotations

import math
import tracemalloc
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from course.device import Array, Buffer, Device
from course.exercises import function_of
from course.lesson import Lesson

TITLE = "The backward pass"
HERE = Path(__file__).parent
DIM, KEYS, ROWS = 32, 32, 16
SCALE = 1 / math.sqrt(DIM)
SHARED_BYTES = 4 * (KEYS * DIM + 2 * ROWS * DIM + ROWS * KEYS)


class Problem(NamedTuple):
    """A head, its forward pass in float64, and the gradient that arrives."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    do: Array


def problem(lesson: Lesson, n: int) -> Problem:
    """Drawn numbers; o and lse as a forward pass in float64 has them."""
    q, k, v, do = (lesson.draw(n, DIM) for _ in range(4))
    s = SCALE * q.astype(np.float64) @ k.T.astype(np.float64)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=1, keepdims=True)
    return Problem(q, k, v, p @ v / total, (m + np.log(total))[:, 0], do)


def put(device: Device, names: str, x: Problem) -> list[Buffer]:
    """Some of its arrays, by their names."""
    return [device.array(name, getattr(x, name).astype(np.float32)) for name in names.split()]


def run(lesson: Lesson) -> None:
    """The kernel, counted; then the formulas against differences of the function itself."""
    n, device = (2048 if lesson.on_gpu else 128), lesson.device
    x = problem(lesson, n)
    kernel = device.compile(HERE / "backward.cu", KEYS=KEYS, DIM=DIM, ROWS=ROWS)
    delta, dk, dv = (device.empty(name, shape) for name, shape in
                     (("delta", n), ("dk", (n, DIM)), ("dv", (n, DIM))))  # fmt: skip
    dq = Buffer(device, "dq", np.zeros((n, DIM), np.float32))
    params = (*put(device, "q k v o lse do", x), delta, dq, dk, dv, n)

    def backward() -> None:
        kernel.launch(n // KEYS, KEYS, 0, *params, 0, SCALE)
        kernel.launch(n // KEYS, KEYS, SHARED_BYTES, *params, 1, SCALE)

    found = lesson.run(backward, clear=(delta, dq, dk, dv))
    results = {"dq": dq.get(), "dk": dk.get(), "dv": dv.get()}
    lesson.check_attention(results, x.q, x.k, x.v, do=x.do)
    blocks = n // KEYS
    lesson.head(f"{n} rows, blocks of {KEYS} keys")
    lesson.compare("operations: five products, and delta", found.flops,
                   10 * n * n * DIM + 2 * n * DIM)  # fmt: skip
    lesson.compare("exponentials: P once more", found.exponentials, n * n)
    lesson.compare("bytes of q, for each block", found.loaded("q"), 4 * n * DIM * blocks)
    lesson.compare("bytes of dO, likewise, and for delta", found.loaded("do"),
                   4 * n * DIM * (blocks + 1))  # fmt: skip
    lesson.compare("bytes added to dq", found.stored("dq"), 4 * n * DIM * blocks)
    lesson.compare("bytes of dk and dv", found.stored("dk", "dv"), 4 * 2 * n * DIM)
    lesson.compare("bank conflicts", found.conflicts, 0)
    lesson.time("backward", backward, 10 * n * n * DIM, 4 * 8 * n * DIM)
    if device.counts:
        _differences(lesson, x, results)


def loss(q: Array, k: Array, v: Array, do: Array) -> float:
    """sum(o * do), whose gradients are dq, dk and dv."""
    s = SCALE * q @ k.T
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return float((p @ v / p.sum(axis=1, keepdims=True) * do).sum())


def _differences(lesson: Lesson, x: Problem, results: dict[str, Array]) -> None:
    """Twelve entries of each gradient beside (f(x + h) - f(x - h)) / 2h in float64."""
    rng, step = np.random.default_rng(2), 1e-5
    arrays = {name: getattr(x, name).astype(np.float64) for name in ("q", "k", "v")}
    lesson.say()
    lesson.say("the largest of 12 differences to (f(x + h) - f(x - h)) / 2h, relative to the array")
    for name in arrays:
        worst = 0.0
        for _ in range(12):
            at = rng.integers(len(x.q)), rng.integers(DIM)
            ends = []
            for h in (step, -step):
                moved = {key: a.copy() for key, a in arrays.items()}
                moved[name][at] += h
                ends.append(loss(**moved, do=x.do.astype(np.float64)))
            slope = (ends[0] - ends[1]) / (2 * step)
            worst = max(worst, abs(slope - float(results[f"d{name}"][at])))
        worst /= float(abs(results[f"d{name}"]).max())
        lesson.lines.append({"what": f"d{name} by differences", "relative": worst})
        lesson.say(f"  d{name}: {worst:.1e}")
        lesson.require(worst < 1e-5, f"d{name} is {worst:.1e} from the differences")


def test_of_blocks(lesson: Lesson, path: Path) -> None:
    """Exercise 1: gradients in NumPy, against differences of the function."""
    gradients = function_of(path, "gradients")
    x = problem(lesson, 48)
    wide = [a.astype(np.float64) for a in (x.q, x.k, x.v, x.o, x.lse, x.do)]
    q, k, v, o, lse, do = wide
    n = 1024
    rows = [lesson.draw(n, DIM).astype(np.float64) for _ in range(4)]
    tracemalloc.start()
    gradients(*rows[:3], rows[3], np.zeros(n), rows[3], SCALE, 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lesson.require(peak < 4 * n * n, f"{n} rows by blocks of 16 take {peak} bytes")
    rng, step = np.random.default_rng(3), 1e-5
    for block in (7, 16, 48):
        found = dict(zip("qkv", gradients(q, k, v, o, lse, do, SCALE, block), strict=True))
        for name in "qkv":
            for _ in range(4):
                at, ends = (rng.integers(48), rng.integers(DIM)), []
                for h in (step, -step):
                    moved = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
                    moved[name][at] += h
                    ends.append(loss(**moved, do=do))
                slope = (ends[0] - ends[1]) / (2 * step)
                lesson.require(abs(slope - float(found[name][at])) < 1e-6,
                               f"blocks of {block}: d{name}{at} is {found[name][at]:.6f}, and the "
                               f"function rises by {slope:.6f}")  # fmt: skip


def test_of_order(lesson: Lesson, path: Path) -> None:
    """Exercise 2: dQ by a thread for each row, written once."""
    n, device = 64, lesson.device
    x = problem(lesson, n)
    delta = device.array("delta", (x.do * x.o).sum(axis=1).astype(np.float32))
    dq = device.empty("dq", (n, DIM))
    kernel = device.compile(path, DIM=DIM)
    launch = partial(kernel.launch, n // 32, 32, 4 * 2 * 32 * DIM,
                     *put(device, "q k v lse do", x), delta, dq, n, SCALE)  # fmt: skip
    found = lesson.run(launch, clear=(dq,))
    lesson.check_attention({"dq": dq.get()}, x.q, x.k, x.v, do=x.do)
    lesson.require(found.stored("dq") == 4 * n * DIM,
                   f"{found.stored('dq')} bytes went to dq, which has {4 * n * DIM}")  # fmt: skip


EXERCISES = (test_of_blocks, test_of_order)
