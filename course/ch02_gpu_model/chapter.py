# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 2: threads, warps, blocks, shared memory and barriers, by a first matrix product."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from course.device import Array
from course.lesson import Counters, Lesson

TITLE = "The GPU model, and a first matrix product"
HERE = Path(__file__).parent
SIDES = (8, 16, 32)
TILE_FLOATS = 1056  # of exercise 2


def run(lesson: Lesson) -> None:
    """A square product with tiles of three sizes."""
    n = 2048 if lesson.on_gpu else 128
    a, b = lesson.draw(2, n, n)
    points = []
    for side in SIDES:
        found = product(lesson, a, b, side)
        points.append((str(side), found.loaded("a", "b") / 2**20))
    if lesson.device.counts:
        lesson.plot("MiB loaded of a and b, by the side of a tile", points)


def product(lesson: Lesson, a: Array, b: Array, side: int) -> Counters:
    """C = A B by tiles of one size."""
    n, device = len(a), lesson.device
    kernel = device.compile(HERE / "matmul.cu", TILE=side)
    c = device.empty("c", (n, n))
    threads, shared_bytes, steps = side * side, 2 * 4 * side * side, n // side
    multiply = partial(kernel.launch, steps * steps, threads, shared_bytes,
                       device.array("a", a), device.array("b", b), c, n, n, n)  # fmt: skip
    found = lesson.run(multiply, clear=(c,))
    lesson.check_product("c", c.get(), a, b)
    lesson.head(f"{n}^3, tiles of {side} x {side}, {threads} threads")
    lesson.compare("operations", found.flops, 2 * n**3)
    lesson.compare("bytes loaded of a", found.loaded("a"), 4 * n**3 // side)
    lesson.compare("bytes loaded of b", found.loaded("b"), 4 * n**3 // side)
    lesson.compare("threads that came to a barrier", found.barrier_waits, n * n * 2 * steps)
    lesson.compare("bank conflicts", found.conflicts, 0)
    lesson.occupancy(kernel, threads, shared_bytes)
    lesson.time("product", multiply, 2 * n**3, 4 * 3 * n * n)
    return found


def test_of_barrier(lesson: Lesson, path: Path) -> None:
    """Exercise 1: a barrier, found by the checker."""
    blocks, device = 4, lesson.device
    x = lesson.draw(blocks, 128)
    source, target = device.array("x", x), device.empty("y", x.shape)
    kernel = device.compile(path)
    lesson.run(partial(kernel.launch, blocks, 128, 512, source, target), clear=(target,))
    lesson.check_equal("y", target.get(), x[:, ::-1])


def test_of_banks(lesson: Lesson, path: Path) -> None:
    """Exercise 2: a transposition without conflicts."""
    n, device = 64, lesson.device
    x = lesson.draw(n, n)
    source, target = device.array("x", x), device.empty("y", (n, n))
    kernel = device.compile(path)
    transpose = partial(kernel.launch, (n // 32) ** 2, 32, 4 * TILE_FLOATS, source, target, n)
    found = lesson.run(transpose, clear=(target,))
    lesson.check_equal("y", target.get(), x.T)
    lesson.require(found.conflicts == 0, f"{found.conflicts} wavefronts are lost to conflicts")
    lesson.require(found.sectors() == 2 * 4 * n * n // 32, "rows are not read and written whole")
    lesson.require(found.wavefronts > 0, "no number passes through shared memory")


EXERCISES = (test_of_barrier, test_of_banks)
