# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of the course's first chapters: the roofline, banks, loads of a causal row, rises."""

from __future__ import annotations

import math

import numpy as np
from canvas import Box, Drawings, Picture

from fulmen.cli.io_model import Call, naive, tiled

BANDWIDTH, PEAK, ORDINARY = 4.8e12, 989e12, 67e12  # an H200, by its data sheet
DIM, HALF = 64, 2  # of the points: d 64, numbers of 16 bits


def _forward(q_rows: int, kv_rows: int) -> tuple[Call, float]:
    """A call of one head, and its operations."""
    pairs = q_rows * kv_rows
    call = Call(q_rows=q_rows, kv_rows=kv_rows, heads=1, kv_heads=1, dim=DIM, dim_v=DIM, size=HALF,
                pairs=pairs, causal=False)  # fmt: skip
    return call, 4.0 * pairs * DIM


def _points(p: Picture) -> list[tuple[str, float, str, tuple[float, float], str]]:
    """Name, operations for each byte, role, where the words stand, their anchor."""
    long, flops = _forward(4096, 4096)
    decode, decode_flops = _forward(1, 4096)
    once = long.row_bytes * 2 * 4096
    return [
        (p.say("one query row", "一行查询"), decode_flops / decode.row_bytes / 4096, "k", (10, 16),
         "start"),
        (p.say("naive", "朴素"), flops / naive(long, "forward"), "hot", (0, -14), "end"),
        (p.say("tiles of 128 rows", "128 行的 tile"), flops / tiled(long, "forward", 128, 128), "v",
         (-12, -10), "end"),
        (p.say("each array once", "每个数组一次"), flops / once, "q", (6, 26), "middle"),
    ]  # fmt: skip


def roofline(p: Picture) -> None:
    """Rates that a card allows, by operations for each byte."""
    area = Box(84, 46, 560, 300)
    low, high, bottom, top = -1.0, 4.0, 11.0, 15.3  # powers of ten

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = area.x + area.width * (math.log10(intensity) - low) / (high - low)
        return x, area.bottom - area.height * (math.log10(rate) - bottom) / (top - bottom)

    for power in range(int(low), int(high) + 1):
        x = at(10.0**power, 10**bottom)[0]
        p.line([(x, area.y), (x, area.bottom)], "faint")
        p.text((x, area.bottom + 18), f"{10.0**power:g}", role="soft", size=12, anchor="middle")
    for power, words in ((11, "0.1"), (12, "1"), (13, "10"), (14, "100"), (15, "1000")):
        y = at(1, 10.0**power)[1]
        p.line([(area.x, y), (area.right, y)], "faint")
        p.text((area.x - 8, y + 4), words, role="soft", size=12, anchor="end")
    for peak, role in ((PEAK, "ink"), (ORDINARY, "soft")):
        ridge = peak / BANDWIDTH
        start = at(0.1, 0.1 * BANDWIDTH) if role == "ink" else at(ridge, peak)
        p.line([start, at(ridge, peak), at(10**high, peak)], role, bold=role == "ink")
    x, y = at(10**high, PEAK)
    p.text((x - 4, y - 9), p.say("tensor cores, {:.0f} TFLOP/s", "张量核心，{:.0f} TFLOP/s").format(
        PEAK / 1e12), size=12.5, anchor="end")  # fmt: skip
    x, y = at(10**high, ORDINARY)
    p.text((x - 4, y + 19), p.say("float32 units, {:.0f} TFLOP/s", "float32 单元，{:.0f} TFLOP/s")
           .format(ORDINARY / 1e12), size=12.5, role="soft", anchor="end")  # fmt: skip
    x, y = at(0.45, 0.45 * BANDWIDTH)
    p.text((x + 16, y + 8), p.say("{} TB/s of memory", "内存 {} TB/s").format(BANDWIDTH / 1e12),
           size=12.5)  # fmt: skip
    for name, intensity, role, (dx, dy), anchor in _points(p):
        x, y = at(intensity, min(PEAK, intensity * BANDWIDTH))
        p.bar(Box(x - 5, y - 5, 10, 10), role, radius=5)
        words = f"{name}, {intensity:,.0f}"
        p.text((x + dx, y + dy), words, role=role, size=12.5, anchor=anchor)
    p.text((area.x, 28), p.say("TFLOP/s that an H200 allows", "H200 允许的 TFLOP/s"), bold=True)
    said = p.say("operations for each byte moved", "每搬运一个字节所做的运算")
    p.text((area.right, area.bottom + 40), said, anchor="end")
    p.text((30, area.bottom + 72), p.say(
        "Points: forward attention at d 64, 16 bits, 4,096 keys, by the IO model of the papers.",
        "各点：前向注意力，d 64，16 位，4,096 个键，由论文的 IO 模型算出。",
    ), role="soft", size=12.5)  # fmt: skip


BANKS = 8  # drawn; a GPU has 32


def banks(p: Picture) -> None:
    """Rows of a tile in shared memory, without and with one number of padding."""
    for left, pitch_words in ((40, BANKS), (390, BANKS + 1)):
        title = p.say("rows of {} numbers", "每行 {} 个数").format(pitch_words)
        p.text((left, 34), title, bold=True)
        words = [(row, column) for row in range(BANKS) for column in range(BANKS)]
        places = {(row, column): divmod(row * pitch_words + column, BANKS)
                  for row, column in words}  # fmt: skip
        rows = 1 + max(place[0] for place in places.values())
        taken = set(places.values())
        grid = (left, 66)
        for bank in range(BANKS):
            p.text((left + bank * 32 + 16, 58), str(bank), role="soft", size=12, anchor="middle")
        column = {places[row, 0] for row in range(BANKS)}
        p.cells(grid, 32, sorted(taken - column), "plain-cell")
        p.cells(grid, 32, sorted(column), "hot-cell")
        gaps = {(i, j) for i in range(rows) for j in range(BANKS)} - taken
        inside = {gap for gap in gaps if gap < max(taken)}
        p.cells(grid, 32, sorted(inside), "hidden")
        met = [sum(bank == place[1] for place in column) for bank in range(BANKS)]
        p.text((left, 384), p.say(
            "wavefronts for a column: {}", "读一列的 wavefront：{}").format(max(met)),
            role="hot")  # fmt: skip
    p.legend((40, 416), [("hot-cell", p.say("column 0 of the tile", "tile 的第 0 列")),
                         ("plain-cell", p.say("the others", "其余各列")),
                         ("hidden", p.say("never used", "不使用"))])  # fmt: skip


def causal_vectors(p: Picture) -> None:
    """Vectors of 16 bytes that rows of a causal matrix load: float32, 16 bits."""
    count, pitch = 24, 12
    for left, lanes in ((40, 4), (390, 8)):
        p.text((left, 34), p.say("{} numbers a load", "每次装载 {} 个数").format(lanes), bold=True)
        loaded: list[tuple[int, int]] = []
        needed: list[tuple[int, int]] = []
        rest: list[tuple[int, int]] = []
        for i in range(count):
            for j in range(count):
                kind = needed if j <= i else loaded if j // lanes * lanes <= i else rest
                kind.append((i, j))
        p.cells((left, 50), pitch, rest, "hidden")
        p.cells((left, 50), pitch, loaded, "hot-cell")
        p.cells((left, 50), pitch, needed, "q-cell")
        part = (len(needed) + len(loaded)) / count**2
        said = p.say("{:.1%} of the matrix is loaded", "装载了矩阵的 {:.1%}")
        p.text((left, 362), said.format(part), role="soft")
    p.legend((40, 394), [("q-cell", p.say("visible", "可见")),
                         ("hot-cell", p.say("loaded beside it", "连带装载")),
                         ("hidden", p.say("never loaded", "从不装载"))])  # fmt: skip


def rises(p: Picture) -> None:
    """How often the maximum of a row rises, measured and by the harmonic sum."""
    rng = np.random.default_rng(0)
    blocks, rows = 256, 4000
    largest = np.maximum.accumulate(rng.standard_normal((rows, blocks, 8)).max(axis=2), axis=1)
    risen = np.concatenate([np.ones((rows, 1)), np.diff(largest, axis=1) > 0], axis=1)
    mean = risen.mean(axis=0).cumsum()
    model = np.cumsum(1 / np.arange(1, blocks + 1))
    area = Box(70, 40, 590, 240)

    def at(block: float, value: float) -> tuple[float, float]:
        x = area.x + area.width * math.log2(block) / math.log2(blocks)
        return x, area.bottom - area.height * value / 7

    for value in range(8):
        y = at(1, value)[1]
        p.line([(area.x, y), (area.right, y)], "faint")
        p.text((area.x - 10, y + 4), str(value), role="soft", size=12, anchor="end")
    for power in range(9):
        x = at(2**power, 0)[0]
        p.text((x, area.bottom + 18), str(2**power), role="soft", size=12, anchor="middle")
    p.line([at(b, model[b - 1]) for b in range(1, blocks + 1)], "q", bold=True)
    for power in range(9):
        x, y = at(2**power, mean[2**power - 1])
        p.bar(Box(x - 4, y - 4, 8, 8), "hot", radius=4)
    p.text(
        (area.x, 26), p.say("rises of the maximum of a row", "一行的最大值上升的次数"), bold=True
    )
    p.text((area.right, area.bottom + 40), p.say("blocks of keys", "键块的个数"), anchor="end")
    p.legend((area.x, area.bottom + 66), [
        ("hot-cell", p.say("mean of 4,000 rows", "4,000 行的平均")),
        ("q-cell", "1 + 1/2 + 1/3 + ..."),
    ])  # fmt: skip


PICTURES: Drawings = {
    "roofline": (440, ("The roofline of an H200", "H200 的 roofline"), roofline),
    "banks": (440, ("Banks of shared memory", "共享内存的存储体"), banks),
    "causal_vectors": (414, ("Loads of causal rows", "因果各行的装载"), causal_vectors),
    "maximum_rises": (364, ("How often a maximum rises", "最大值上升的次数"), rises),
}
