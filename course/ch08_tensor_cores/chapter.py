# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 8: mma.sync, ldmatrix, the swizzle and the cp.async pipeline."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from course.device import Array
from course.lesson import Counters, Lesson

TITLE = "Tensor cores"
HERE = Path(__file__).parent
DIM, ROWS, KEYS, WARPS = 64, 64, 32, 4
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """The kernel, without its swizzle, and without its pipeline."""
    n = 4096 if lesson.on_gpu else 128
    q, k, v = (lesson.draw(n, DIM).astype(np.float16) for _ in range(3))
    table = []
    for title, swizzle, stages in (
        ("two stages, swizzled", 1, 2),
        ("without swizzle", 0, 2),
        ("one stage", 1, 1),
    ):
        found = attention(lesson, title, q, k, v, swizzle, stages)
        table.append((title, found.wavefronts))
    if lesson.device.counts:
        lesson.plot("wavefronts of shared memory", table)


def attention(
    lesson: Lesson, title: str, q: Array, k: Array, v: Array, swizzle: int, stages: int
) -> Counters:
    """One head."""
    n, device = len(q), lesson.device
    path = HERE / "flash_mma.cu"
    kernel = device.compile(path, KEYS=KEYS, SWIZZLE=swizzle, STAGES=stages)
    o = device.empty("o", (n, DIM), np.float16)
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    shared_bytes = 2 * DIM * (ROWS + 2 * stages * KEYS)
    attend = partial(kernel.launch, n // ROWS, 32 * WARPS, shared_bytes, *arrays, o, n,
                     LOG2_E / math.sqrt(DIM))  # fmt: skip
    found = lesson.run(attend, clear=(o,))
    lesson.check_attention({"o": o.get()}, q, k, v)
    lesson.head(f"{n} rows, {title}")
    blocks, tiles = n // ROWS, n // KEYS
    lesson.compare("operations of tensor cores", found.flops, 4 * n * n * DIM)
    # P, and for each tile the factor of two rows in every lane.
    lesson.compare("exponentials", found.exponentials, n * n + blocks * tiles * 32 * WARPS * 2)
    lesson.compare("bytes of k and v", found.loaded("k", "v"), 2 * 2 * n * DIM * blocks)
    lesson.compare("bytes of q", found.loaded("q"), 2 * n * DIM)
    lesson.compare("bank conflicts", found.conflicts, 0 if swizzle else conflicts(blocks, tiles))
    lesson.occupancy(kernel, 32 * WARPS, shared_bytes)
    lesson.time("attention", attend, 4 * n * n * DIM, 2 * 4 * n * DIM)
    return found


def conflicts(blocks: int, tiles: int) -> int:
    """Without swizzle, of ldmatrix.x4, which reads four matrices of 8 rows of 16 bytes.

    Rows are 128 bytes apart, so the 8 of a matrix lie in the same four banks: 8 wavefronts, not 1.
    """
    of_q = DIM // 16
    of_tile = 2 * KEYS // 16 * DIM // 16  # K and V
    return blocks * WARPS * (of_q + tiles * of_tile) * 4 * (8 - 1)


def test_of_fragments(lesson: Lesson, path: Path) -> None:
    """Exercise 1: one product of a warp, its operands from memory without ldmatrix."""
    device = lesson.device
    a, b = lesson.draw(16, 16).astype(np.float16), lesson.draw(16, 8).astype(np.float16)
    d = device.empty("d", (16, 8))
    kernel = device.compile(path)
    launch = partial(kernel.launch, 1, 32, 0, device.array("a", a), device.array("b", b), d)
    found = lesson.run(launch, clear=(d,))
    lesson.check_product("d", d.get(), a.astype(np.float32), b.astype(np.float32))
    lesson.require(found.flops == 2 * 16 * 16 * 8, f"{found.flops} operations are not one product")


def test_of_swizzle(lesson: Lesson, path: Path) -> None:
    """Exercise 2: a tile with rows of 64 bytes."""
    device = lesson.device
    x = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32)
    y = device.empty("y", (32, 32), np.uint16)
    kernel = device.compile(path)
    found = lesson.run(partial(kernel.launch, 1, 32, 2048, device.array("x", x), y), clear=(y,))
    lesson.check_equal("y", y.get(), x)
    lesson.require(found.conflicts == 0, f"{found.conflicts} wavefronts are lost to conflicts")
    lesson.require(found.wavefronts == 2 * 2048 // 128, "the tile does not pass through ldmatrix")


EXERCISES = (test_of_fragments, test_of_swizzle)
