# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 5: FlashAttention-1, keys outside, and its traffic against the size of its tiles."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from course.device import Array, Buffer, Kernel
from course.exercises import function_of
from course.lesson import Counters, Lesson

TITLE = "FlashAttention-1 and its IO theorem"
HERE = Path(__file__).parent
DIM, THREADS = 32, 64
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """One head with tiles of four sizes."""
    n = 1024 if lesson.on_gpu else 128
    q, k, v = lesson.draw(3, n, DIM)
    points = []
    for keys in (4, 8, 16, 32):
        path = HERE / "flash_1.cu"
        kernel = lesson.device.compile(path, KEYS=keys, DIM=DIM, THREADS=THREADS)
        found = attention(lesson, kernel, keys, q, k, v)
        tiles, shared_bytes = n // keys, 2 * 4 * keys * DIM
        lesson.head(f"{keys} keys a tile, {shared_bytes} bytes of shared memory")
        lesson.compare("operations of the two products", found.flops, 4 * n * n * DIM)
        lesson.compare("exponentials", found.exponentials, n * n + 2 * n * tiles)
        lesson.compare("bytes of k and v", found.moved("k", "v"), 4 * 2 * n * DIM)
        lesson.compare("bytes of q", found.moved("q"), 4 * n * DIM * tiles)
        lesson.compare("bytes of o, read and written", found.moved("o"), 4 * 2 * n * DIM * tiles)
        lesson.compare("bytes of m and l, likewise", found.moved("m", "l"), 4 * 4 * n * tiles)
        points.append((f"{shared_bytes}", found.moved() / 1024))
    if lesson.device.counts:
        lesson.plot("KiB moved, by bytes of shared memory", points)


def attention(
    lesson: Lesson, kernel: Kernel, keys: int, q: Array, k: Array, v: Array, threads: int = THREADS
) -> Counters:
    """Runs a kernel with flash_1.cu's parameters and judges it."""
    n, device = len(q), lesson.device
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    state = [
        Buffer(device, "o", np.zeros((n, DIM), np.float32)),
        Buffer(device, "m", np.full(n, -np.inf, np.float32)),
        Buffer(device, "l", np.zeros(n, np.float32)),
    ]
    attend = partial(kernel.launch, 1, threads, 2 * 4 * keys * DIM, *arrays, *state, n,
                     LOG2_E / math.sqrt(DIM))  # fmt: skip
    found = lesson.run(attend, clear=state)
    lesson.check_attention({"o": state[0].get()}, q, k, v)
    lesson.time("attention", attend, 4 * n * n * DIM, 4 * 4 * n * DIM)
    return found


def test_of_traffic(lesson: Lesson, path: Path) -> None:
    """Exercise 1: the formula against the counters."""
    bytes_moved, most_keys = function_of(path, "bytes_moved"), function_of(path, "most_keys")
    for n, keys in ((64, 8), (128, 32)):
        kernel = lesson.device.compile(HERE / "flash_1.cu", KEYS=keys, DIM=DIM, THREADS=THREADS)
        moved = attention(lesson, kernel, keys, *lesson.draw(3, n, DIM)).moved()
        said = bytes_moved(n, DIM, keys)
        lesson.require(said == moved, f"{n} rows, tiles of {keys} keys: {said} bytes are said, "
                       f"{moved} are counted")  # fmt: skip
    for dim, shared_bytes, keys in ((64, 65536, 128), (128, 232448, 227), (32, 1000, 3)):
        said = most_keys(dim, shared_bytes)
        lesson.require(said == keys, f"{said} keys of d {dim} do not fill {shared_bytes} bytes")


def test_of_two_faults(lesson: Lesson, path: Path) -> None:
    """Exercise 2: a kernel that was right before two lines were changed."""
    kernel = lesson.device.compile(path, KEYS=16, DIM=DIM, THREADS=THREADS)
    q, k, v = lesson.draw(3, 128, DIM)
    attention(lesson, kernel, 16, 2 * q, k, v)


EXERCISES = (test_of_traffic, test_of_two_faults)
