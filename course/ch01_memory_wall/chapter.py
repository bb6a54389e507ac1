# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 1: what attention computes, what it moves, and which of the two takes the time."""

from __future__ import annotations

import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
from course.device import Array
from course.exercises import function_of
from course.lesson import Lesson

from fulmen.cli.io_model import Call, naive

TITLE = "The memory wall"
HERE = Path(__file__).parent
DIM = 64
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """Naive attention on the device, counted; then in NumPy, timed at 2k, 4k and 8k rows."""
    n = 2048 if lesson.on_gpu else 256
    q, k, v = lesson.draw(3, n, DIM)
    device = lesson.device
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    s, sums, o = (device.empty(name, shape) for name, shape in
                  (("s", (n, n)), ("sums", n), ("o", (n, DIM))))  # fmt: skip
    kernel = device.compile(HERE / "naive.cu", DIM=DIM)
    params = (*arrays, s, sums, o, n)
    scale = LOG2_E / math.sqrt(DIM)

    def attend() -> None:
        kernel.launch(n * n // 128, 128, 0, *params, 0, scale)
        kernel.launch(n // 4, 128, 0, *params, 1, scale)
        kernel.launch(n, DIM, 0, *params, 2, scale)

    found = lesson.run(attend, clear=(s, sums, o))
    lesson.check_attention({"o": o.get()}, q, k, v)

    lesson.head(f"{n} rows, d {DIM}")
    lesson.compare("operations of the two products", found.flops, 4 * n * n * DIM)
    lesson.compare("exponentials", found.exponentials, n * n)
    lesson.compare("bytes that threads load of q and k",
                   found.loaded("q", "k"), 2 * 4 * n * n * DIM)  # fmt: skip
    lesson.compare("bytes written into the score matrix", found.stored("s"), 2 * 4 * n * n)
    # The softmax reads it twice; in the output every thread of a row reads all its numbers.
    lesson.compare("bytes read from it", found.loaded("s"), (2 + DIM) * 4 * n * n)
    # A warp has one row of q and 32 of k, of which it reads one number each: 1 + 32 pieces.
    lesson.compare("pieces of 32 bytes asked for, of q and k",
                   found.sectors("q", "k"), n * n // 32 * DIM * 33)  # fmt: skip
    call = _call(n)
    lesson.time("attention", attend, 4 * n * n * DIM, naive(call, "forward"))
    if not lesson.on_gpu:
        _on_this_machine(lesson)


def _call(rows: int) -> Call:
    return Call(q_rows=rows, kv_rows=rows, heads=1, kv_heads=1, dim=DIM, dim_v=DIM, size=4,
                pairs=rows * rows, causal=False)  # fmt: skip


def attention(q: Array, k: Array, v: Array) -> Array:
    """The plain way in NumPy, in as little memory as it takes."""
    s = q @ k.T
    s *= 1 / math.sqrt(q.shape[1])
    s -= s.max(axis=1, keepdims=True)
    np.exp(s, out=s)
    return s @ v / s.sum(axis=1, keepdims=True)


def _on_this_machine(lesson: Lesson) -> None:
    """Time and memory of one head; memory is what the formula says, time grows as it does."""
    lesson.say()
    lesson.say("one head in NumPy on this machine: 4 n^2 bytes of scores, the peak, the time")
    points = []
    for n in (2048, 4096, 8192):
        q, k, v = lesson.draw(3, n, DIM)
        tracemalloc.start()
        begin = time.perf_counter()
        attention(q, k, v)
        seconds = time.perf_counter() - begin
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        lesson.lines.append({"what": "NumPy", "rows": n, "seconds": seconds, "peak_bytes": peak})
        lesson.say(f"  {n} rows: {4 * n * n / 2**20:6.0f} MiB, {peak / 2**20:6.0f} MiB, "
                   f"{seconds * 1e3:6.0f} ms")  # fmt: skip
        lesson.require(peak < 1.2 * 4 * n * n, f"{n} rows: {peak} bytes at the peak")
        points.append((str(n), seconds * 1e3))
    lesson.plot("milliseconds", points)


def test_of_models(lesson: Lesson, path: Path) -> None:
    """Exercise 1: bytes, intensity and a bound."""
    num_bytes = function_of(path, "naive_bytes")
    for rows in (512, 2048, 4096):
        lesson.require(
            num_bytes(rows, DIM, 4) == naive(_call(rows), "forward"),
            f"naive_bytes({rows}, {DIM}, 4) is not what the three launches move",
        )
    intensity = function_of(path, "intensity")
    lesson.require(abs(intensity(1e12, 4e9) - 250) < 1e-9, "intensity(1e12, 4e9) is not right")
    bound = function_of(path, "seconds_at_least")
    for flops, moved, expected in ((4e12, 1e9, 4e-3), (1e9, 48e9, 1e-2), (2e12, 9.6e9, 2e-3)):
        got = bound(flops, moved, 1e15, 4.8e12)
        lesson.require(
            abs(got / expected - 1) < 1e-9,
            f"a card of 1e15 FLOP/s and 4.8e12 B/s needs {expected:g} s for {flops:g} "
            f"operations and {moved:g} bytes, and not {got:g}",
        )


def test_of_pieces(lesson: Lesson, path: Path) -> None:
    """Exercise 2: the same copy with few pieces."""
    n, device = 128, lesson.device
    x = lesson.draw(n, n)
    source, target = device.array("x", x), device.empty("y", (n, n))
    kernel = device.compile(path)

    def scale() -> None:
        kernel.launch(n * n // 128, 128, 0, source, target, n)

    found = lesson.run(scale, clear=(target,))
    lesson.check_equal("y", target.get(), 2 * x)
    asked, least = found.sectors(), 2 * 4 * n * n // 32
    lesson.require(
        asked == least,
        f"{asked} pieces of 32 bytes were asked for; {least} hold all that is read and written",
    )


EXERCISES = (test_of_models, test_of_pieces)
