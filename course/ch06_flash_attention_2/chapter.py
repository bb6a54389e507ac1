# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 6: FlashAttention-2, queries outside, beside version 1; and causal blocks left out."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from course.ch05_flash_attention_1 import chapter as version_1
from course.device import Array, Kernel
from course.exercises import function_of
from course.lesson import Counters, Lesson

TITLE = "FlashAttention-2"
HERE = Path(__file__).parent
DIM, KEYS, THREADS = version_1.DIM, 16, 32
WINDOW = 20  # of exercise 1
# Of exercise 3: rows, heads, multiprocessors, bytes of shared memory; and tiles to choose from.
PROBLEMS = ((128, 4, 4, 4096), (128, 1, 4, 10000), (128, 4, 8, 2048))
TILES = tuple(product((32, 64, 128), (8, 16, 32, 64)))
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """Full, causal, and version 1 with the same tiles."""
    n = 4096 if lesson.on_gpu else 128
    q, k, v = lesson.draw(3, n, DIM)
    totals = []
    for causal in (False, True):
        kernel = compiled(lesson, HERE / "flash_2.cu", CAUSAL=int(causal))
        found = attention(lesson, kernel, q, k, v, causal=causal)
        blocks = n // THREADS
        # Tiles that a block of rows meets, over all blocks; a causal one stops at its last row.
        tiles = sum((b + 1) * THREADS // KEYS if causal else n // KEYS for b in range(blocks))
        pairs = tiles * KEYS * THREADS
        lesson.head(f"{'causal' if causal else 'full'}, {n} rows, blocks of {THREADS} x {KEYS}")
        lesson.compare("operations of the two products", found.flops, 4 * pairs * DIM)
        lesson.compare("exponentials", found.exponentials, pairs + tiles * THREADS)
        lesson.compare("bytes of k and v", found.moved("k", "v"), 4 * 2 * tiles * KEYS * DIM)
        lesson.compare("bytes of q", found.moved("q"), 4 * n * DIM)
        lesson.compare("bytes of o and lse", found.moved("o", "lse"), 4 * n * (DIM + 1))
        lesson.compare("bank conflicts", found.conflicts, 0)
        totals.append(("2, causal" if causal else "2, full", found))
    if lesson.device.counts:
        _beside_version_1(lesson, q, k, v, totals)


def compiled(lesson: Lesson, path: Path, **constants: int) -> Kernel:
    """A kernel of this chapter."""
    return lesson.device.compile(
        path, **{"KEYS": KEYS, "DIM": DIM, "THREADS": THREADS, **constants}
    )


def attention(
    lesson: Lesson, kernel: Kernel, q: Array, k: Array, v: Array, rows: int = THREADS,
    keys: int = KEYS, **options: object
) -> Counters:  # fmt: skip
    """Runs a kernel with flash_2.cu's parameters and judges it; rows of a block, keys of a tile."""
    n, device = len(q), lesson.device
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    o, lse = device.empty("o", (n, DIM)), device.empty("lse", n)
    attend = partial(kernel.launch, n // rows, rows, 2 * 4 * keys * DIM, *arrays, o, lse, n,
                     LOG2_E / math.sqrt(DIM))  # fmt: skip
    found = lesson.run(attend, clear=(o, lse))
    lesson.check_attention({"o": o.get(), "lse": lse.get()}, q, k, v, **options)
    lesson.time("attention", attend, 4 * n * n * DIM, 4 * 4 * n * DIM)
    return found


def _beside_version_1(
    lesson: Lesson, q: Array, k: Array, v: Array, totals: list[tuple[str, Counters]]
) -> None:
    """The same tiles in the other order."""
    first = lesson.device.compile(
        version_1.HERE / "flash_1.cu", KEYS=KEYS, DIM=DIM, THREADS=THREADS
    )
    found = version_1.attention(lesson, first, KEYS, q, k, v, THREADS)
    table = [("1, full", found), *totals]
    lesson.plot("KiB written", [(name, x.stored() / 1024) for name, x in table])
    lesson.plot("KiB read", [(name, x.loaded() / 1024) for name, x in table])
    lesson.plot("exponentials", [(name, x.exponentials) for name, x in table])


def test_of_window(lesson: Lesson, path: Path) -> None:
    """Exercise 1: a window, right and without tiles that nothing sees."""
    n = 128
    q, k, v = lesson.draw(3, n, DIM)
    kernel = compiled(lesson, path, CAUSAL=1, WINDOW=WINDOW)
    found = attention(lesson, kernel, q, k, v, causal=True, window=(WINDOW, 0))
    seen = np.tri(n, dtype=bool) & ~np.tri(n, k=-WINDOW - 1, dtype=bool)
    blocks = seen.reshape(n // THREADS, THREADS, n // KEYS, KEYS).any(axis=(1, 3)).sum()
    least = 4 * KEYS * DIM * int(blocks)
    lesson.require(found.loaded("k") == least, f"{found.loaded('k')} bytes of k were loaded; the "
                   f"tiles that are seen have {least}")  # fmt: skip


def test_of_waves(lesson: Lesson, path: Path) -> None:
    """Exercise 2: blocks and waves, by examples."""
    blocks, filled = function_of(path, "blocks"), function_of(path, "filled")
    for words, count in (((2, 8, 4096, 128), 512), ((1, 16, 1000, 128), 128), ((1, 1, 1, 64), 1)):
        lesson.require(blocks(*words) == count, f"blocks{words} is {blocks(*words)}, not {count}")
    for places, part in (((132, 132, 1), 1.0), ((133, 132, 1), 0.5038), ((1, 132, 2), 0.0038),
                        ((528, 132, 2), 1.0), ((512, 132, 1), 0.9697)):  # fmt: skip
        got = filled(*places)
        lesson.require(abs(got - part) < 1e-4, f"filled{places} is {got:.4f}, not {part}")


def test_of_tiles(lesson: Lesson, path: Path) -> None:
    """Exercise 3: of the tiles that are allowed none moves less, or waits less."""
    choose = function_of(path, "tile")
    for problem in PROBLEMS:
        n, heads, multiprocessors, shared_bytes = problem
        allowed = [
            (r, c)
            for r, c in TILES
            if heads * (n // r) >= multiprocessors and 2 * 4 * c * DIM <= shared_bytes
        ]
        rows, keys = choose(*problem)
        said = f"tile{problem} is {rows, keys}"
        if (rows, keys) not in allowed:
            lesson.require(False, f"{said}, which is not allowed there")
            continue
        kernel = compiled(lesson, HERE / "flash_2.cu", CAUSAL=0, THREADS=rows, KEYS=keys)
        q, k, v = lesson.draw(3, n, DIM)
        found = attention(lesson, kernel, q, k, v, rows, keys)
        loaded, least = found.loaded("k", "v"), min(4 * 2 * (n // r) * n * DIM for r, _ in allowed)
        lesson.require(loaded == least, f"{said}: {loaded} bytes loaded; {least} would do")
        waits, least = found.barrier_waits, n * min(2 * n // c for _, c in allowed)
        lesson.require(waits == least, f"{said}: {waits} waits at barriers; {least} would do")


EXERCISES = (test_of_window, test_of_waves, test_of_tiles)
