# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 10: one query against a long cache: splits of the keys, pages, heads that share keys."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from course.cards import H200
from course.exercises import function_of
from course.lesson import Lesson

TITLE = "Decoding: splits, pages, shared heads"
HERE = Path(__file__).parent
DIM, PAGE, GROUP, KV_HEADS = 64, 16, 4, 2
LOG2_E = math.log2(math.e)


def run(lesson: Lesson) -> None:
    """Three requests of unequal lengths, their keys in one piece and in three."""
    lengths = [8192, 300, 20000] if lesson.on_gpu else [100, 7, 150]
    for splits in (1, 3):
        decode(lesson, lengths, splits)
    _fill(lesson)


def decode(lesson: Lesson, lengths: list[int], splits: int) -> None:
    """One step of decoding."""
    requests, heads, device = len(lengths), KV_HEADS * GROUP, lesson.device
    max_pages = -(-max(lengths) // PAGE)
    q = lesson.draw(requests, heads, DIM)
    k, v = lesson.draw(2, requests, max_pages * PAGE, KV_HEADS, DIM)
    # Pages lie in any order, and those that no request has hold NaN.
    rng = np.random.default_rng(1)
    pool = requests * max_pages + 5
    table = rng.permutation(pool)[: requests * max_pages].reshape(requests, max_pages)
    pages = np.full((2, pool, PAGE, KV_HEADS, DIM), np.nan, np.float32)
    for name, x in enumerate((k, v)):
        pages[name, table] = x.reshape(requests, max_pages, PAGE, KV_HEADS, DIM)
    table = table.astype(np.int32)
    for request, length in enumerate(lengths):
        table[request, -(-length // PAGE) :] = -1  # never followed
    kernel = device.compile(HERE / "decode.cu", DIM=DIM, PAGE=PAGE, GROUP=GROUP)
    o = device.empty("o", (requests, heads, DIM))
    parts = (device.empty("o_parts", (requests, heads, splits, DIM)),
             device.empty("lse_parts", (requests, heads, splits)))  # fmt: skip
    inputs = [
        *(device.array(name, x) for name, x in (("q", q), ("k", pages[0]), ("v", pages[1]))),
        device.array("table", table),
        device.array("lengths", np.array(lengths, np.int32)),
    ]
    params = (*inputs, *parts, o, KV_HEADS, max_pages, splits)
    shared_bytes = 4 * (GROUP * DIM + 32 * (DIM + 1) + 32 * DIM)
    scale = LOG2_E / math.sqrt(DIM)
    blocks = requests * KV_HEADS * splits

    def attend() -> None:
        kernel.launch(blocks, 32, shared_bytes, *params, 0, scale)
        kernel.launch(requests * heads, 32, 0, *params, 1, scale)

    found = lesson.run(attend, clear=(*parts, o))
    keys = [x.transpose(0, 2, 1, 3) for x in (k, v)]
    lesson.check_attention({"o": o.get()[:, :, None]}, q[:, :, None], *keys,
                           kv_lengths=np.array(lengths))  # fmt: skip
    total = sum(lengths)
    tiles = sum(-(-part // 32) for length in lengths for part in cut(length, splits))
    lesson.head(f"{requests} requests of {', '.join(map(str, lengths))} keys, {blocks} blocks")
    lesson.compare(
        "bytes of k and v, each once", found.loaded("k", "v"), 4 * 2 * total * KV_HEADS * DIM
    )
    lesson.compare("bytes of the table", found.loaded("table"), 4 * total * KV_HEADS)
    of_merge = 2 * requests * heads * splits * DIM
    lesson.compare("operations of attention and merge", found.flops,
                   4 * 32 * tiles * heads * DIM + of_merge)  # fmt: skip
    lesson.compare("bytes of parts, written", found.stored("o_parts", "lse_parts"),
                   4 * requests * heads * splits * (DIM + 1))  # fmt: skip
    lesson.compare("bank conflicts", found.conflicts, 0)
    lesson.time("decoding", attend, 4 * total * heads * DIM, 4 * 2 * total * KV_HEADS * DIM)


def cut(length: int, splits: int) -> list[int]:
    """Keys of each split: whole tiles of 32, as equal as they can be."""
    step = 32 * -(-length // (32 * splits))
    return [max(0, min(length, (s + 1) * step) - s * step) for s in range(splits)]


def _fill(lesson: Lesson) -> None:
    """How much of a card has work, for one request and 8 heads of keys."""
    points = [(f"{splits} splits", 100 * min(1.0, 8 * splits / H200.multiprocessors))
              for splits in (1, 2, 4, 8, 16)]  # fmt: skip
    lesson.plot(
        f"% of {H200.multiprocessors} multiprocessors with work, one request, 8 heads", points
    )


def test_of_append(lesson: Lesson, path: Path) -> None:
    """Exercise 1: rows into pages, and into nothing else."""
    device, new_rows, max_pages, page = lesson.device, 3, 3, 4
    lengths = np.array([3, 0, 10], np.int32)  # the last request has room for two rows more
    table = np.array([[6, 1, 4], [0, 8, 2], [5, 7, 3]], np.int32)
    rows = lesson.draw(3, new_rows, 32)
    before = np.full((9, page, 32), -1, np.float32)
    expected = before.copy()
    for request, length in enumerate(lengths):
        for row in range(min(new_rows, max_pages * page - int(length))):
            key = int(length) + row
            expected[table[request, key // page], key % page] = rows[request, row]
    pages = device.array("pages", before)
    kernel = device.compile(path, PAGE=page)
    launch = partial(kernel.launch, 3 * new_rows, 32, 0, device.array("rows", rows), pages,
                     device.array("table", table), device.array("lengths", lengths),
                     new_rows, max_pages)  # fmt: skip
    lesson.run(launch, clear=(pages,))
    lesson.check_equal("pages", pages.get(), expected)


def test_of_rotation(lesson: Lesson, path: Path) -> None:
    """Exercise 2: what a rotation by positions must keep, and a few of its numbers."""
    rotated = function_of(path, "rotated")
    x = lesson.draw(6, 8).astype(np.float64)
    at = np.arange(6)
    lesson.require(bool(np.allclose(rotated(x, 0 * at), x)), "position 0 changes a row")
    lengths = np.linalg.norm(rotated(x, 7 * at + 3), axis=1)
    lesson.require(bool(np.allclose(lengths, np.linalg.norm(x, axis=1))), "a row's length changes")
    products = [rotated(x, at + shift) @ rotated(x, at + shift).T for shift in (0, 5, 1000)]
    same = all(np.allclose(p, products[0]) for p in products)
    lesson.require(same, "products depend on more than the distance of the positions")
    unit = np.eye(8)[:2]
    got = rotated(unit, np.array([1, 2]), base=16.0)
    right = np.array(
        [[0.540302, 0, 0, 0, 0.841471, 0, 0, 0], [0, 0.540302, 0, 0, 0, 0.841471, 0, 0]]
    )
    lesson.require(bool(np.allclose(got, right, atol=1e-6)), "an angle, or its sense, is another")


EXERCISES = (test_of_append, test_of_rotation)
