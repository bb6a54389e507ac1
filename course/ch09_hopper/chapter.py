# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 9: the copy engine, mbarriers, wgmma, producers and consumers, ping-pong."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from course.device import Array, DeviceError
from course.lesson import Counters, Lesson

TITLE = "Hopper"
HERE = Path(__file__).parent
ARCHITECTURES = ("sm_90",)
DIM, KEYS = 64, 64
LOG2_E = math.log2(math.e)
# What is left out or changed in the kernel's text, and what the checker then says.
FAULTS = (
    ("no wait for Q", "  ptx::mbarrier_wait(shared.q_full(), 0);\n", "", "race"),
    ("no wait for full", "    ptx::mbarrier_wait(shared.full(j), parity(j));\n", "", "race"),
    ("the other parity of full", "full(j), parity(j));", "full(j), parity(j) ^ 1);", "two behind"),
    ("no wait for empty", "    ptx::mbarrier_wait(shared.empty(j), parity(j) ^ 1);", "    ",
     "arrivals in one phase"),
    ("empty is never said", "    ptx::mbarrier_arrive(shared.empty(j - 1));\n", "", "deadlock"),
    ("16 bytes too many are expected", "2 * kTileBytes);", "2 * kTileBytes + 16);", "16 bytes"),
    ("no wgmma.wait_group", "  ptx::wgmma_wait<0>();\n", "", "before wgmma.wait_group"),
    ("no wgmma.fence", "  ptx::wgmma_fence();\n#pragma", "#pragma", "missing wgmma.fence"),
    ("no fence.mbarrier_init", "    ptx::fence_mbarrier_init();\n", "", "fence.mbarrier_init"),
    ("no barrier behind the making", "  ptx::block_sync();\n", "", "no mbarrier was made"),
    ("no first turn", "if (PING_PONG && consumer == 1) ptx::bar_arrive(1, 256);", "", "deadlock"),
)  # fmt: skip


def run(lesson: Lesson) -> None:
    """One consumer, two, and two that take turns."""
    if lesson.on_gpu and lesson.device.capability != 90:
        lesson.say("this chapter's kernels are for compute capability 9.0 alone")
        return
    n = 8192 if lesson.on_gpu else 256
    q, k, v = (lesson.draw(n, DIM).astype(np.float16) for _ in range(3))
    for title, consumers, ping_pong in (
        ("one consumer", 1, 0),
        ("two consumers", 2, 0),
        ("two, ping-pong", 2, 1),
    ):
        attention(lesson, title, HERE, q, k, v, consumers, ping_pong)
    if lesson.device.counts:
        _faults(lesson, q, k, v)


def attention(
    lesson: Lesson, title: str, folder: Path, q: Array, k: Array, v: Array, consumers: int,
    ping_pong: int,
) -> Counters:  # fmt: skip
    """One head, by the kernel of a folder."""
    n, device, stages = len(q), lesson.device, 2
    kernel = device.compile(folder / "flash_hopper.cu", KEYS=KEYS, STAGES=stages,
                            CONSUMERS=consumers, PING_PONG=ping_pong)  # fmt: skip
    o = device.empty("o", (n, DIM), np.float16)
    arrays = [device.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    maps = [device.tensor_map(x, rows) for x, rows in zip(arrays, (64, KEYS, KEYS), strict=True)]
    threads, blocks, tiles = 128 + 128 * consumers, n // (64 * consumers), n // KEYS
    shared_bytes = 2 * DIM * (64 * consumers + 2 * stages * KEYS) + 8 * (1 + 2 * stages)
    attend = partial(kernel.launch, blocks, threads, shared_bytes, *maps, o, n,
                     LOG2_E / math.sqrt(DIM))  # fmt: skip
    found = lesson.run(attend, clear=(o,))
    lesson.check_attention({"o": o.get()}, q, k, v)
    lesson.head(f"{n} rows, {title}")
    lesson.compare("operations of tensor cores", found.flops, 4 * n * n * DIM)
    # A warpgroup's: d / 16 for S and KEYS / 16 for O, for each tile.
    warpgroups = blocks * consumers
    lesson.compare("wgmma instructions", found.products, warpgroups * tiles * (DIM + KEYS) // 16)
    lesson.compare("exponentials", found.exponentials, n * n + warpgroups * tiles * 128 * 2)
    lesson.compare("bytes of k and v", found.loaded("k", "v"), 2 * 2 * n * DIM * blocks)
    lesson.compare("bytes of q", found.loaded("q"), 2 * n * DIM)
    lesson.compare("bank conflicts", found.conflicts, 0)
    lesson.time("attention", attend, 4 * n * n * DIM, 2 * 4 * n * DIM)
    return found


def _faults(lesson: Lesson, q: Array, k: Array, v: Array) -> None:
    """The kernel with one fault after the other, and the beginning of what the checker says."""
    texts = {name: (HERE / name).read_text("utf-8") for name in ("flash_hopper.cu", "rows.cuh")}
    lesson.say()
    lesson.say("with a fault, the checker says")
    for what, old, new, expected in FAULTS:
        assert sum(text.count(old) > 0 for text in texts.values()) == 1, what
        said = "nothing"
        with TemporaryDirectory() as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_text(text.replace(old, new, 1), encoding="utf-8")
            quiet = Lesson(lesson.device, lesson.output, quiet=True)
            try:
                attention(quiet, what, Path(folder), q, k, v, 2, 1)
            except DeviceError as error:
                said = " ".join(str(error).split())
        del lesson.device.compiled[-1]  # a text that is no more
        lesson.say(f"  {what:<32}{said.split(': ', 1)[-1][:120]}")
        lesson.lines.append({"what": what, "said": said})
        lesson.require(expected in said, f"{what}: the checker says {said[:200]}")


def test_of_ring(lesson: Lesson, path: Path) -> None:
    """Exercise 1: a ring of two places."""
    chunks, device = 7, lesson.device
    x = np.round(lesson.draw(chunks, 256) * 8)  # sums of whole numbers are exact
    y = device.empty("y", 128)
    kernel = device.compile(path)
    source = device.array("x", x)
    lesson.run(partial(kernel.launch, 1, 160, 2 * 1024 + 32, source, y, chunks), clear=(y,))
    lesson.check_equal("y", y.get(), x.reshape(2 * chunks, 128).sum(axis=0))


def test_of_turns(lesson: Lesson, path: Path) -> None:
    """Exercise 2: two warps that alternate."""
    device = lesson.device
    order = device.empty("order", 16, np.int32)
    kernel = device.compile(path)
    lesson.run(partial(kernel.launch, 1, 64, 16, order), clear=(order,))
    lesson.check_equal("order", order.get(), np.tile(np.array([0, 1], np.int32), 8))


EXERCISES = (test_of_ring, test_of_turns)
