# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The two orders of the loops: which tile stays, which ones pass, and what each order moves."""

from __future__ import annotations

import math

from canvas import Box, Drawings, Picture

COUNT, PITCH = 5, 44
VERSION_1 = (
    ("k", "K, V stay in shared memory", "K、V 留在共享内存"),
    ("o", "O, m, l: read and written in every square", "O、m、l：每一格都要读和写"),
    ("soft", "one block of threads a head", "每个头一个线程块"),
)
VERSION_2 = (
    ("o", "Q, O, m, l stay in registers", "Q、O、m、l 留在寄存器"),
    ("k", "K, V: read in every square", "K、V：每一格都要读"),
    ("soft", "a block of threads a row of tiles", "每行 tile 一个线程块"),
)


def _grid(p: Picture, left: int, title: str, by_columns: bool) -> Box:
    """Pairs of tiles in the order in which they are met: down a column, or along a row."""
    p.text((left, 36), title, bold=True)
    grid = Box(left + 46, 92, COUNT * PITCH, COUNT * PITCH)
    own = 1  # the column, or row, at work
    for at in range(COUNT):
        box = Box(grid.x + at * PITCH + 3, 56, PITCH - 6, 28)
        stays = by_columns and at == own
        p.box(box, "k" if stays or not by_columns else "plain")
        p.label(
            box, f"K_{{{at}}}V_{{{at}}}", size=12, role="k" if stays or not by_columns else "soft"
        )
        box = Box(left, grid.y + at * PITCH + 6, 38, PITCH - 12)
        stays = not by_columns and at == own
        p.box(box, "q" if stays or by_columns else "plain")
        p.label(box, f"Q_{{{at}}}", size=12.5, role="q" if stays or by_columns else "soft")
    for i in range(COUNT):
        for j in range(COUNT):
            met = j if by_columns else i
            box = Box(grid.x + j * PITCH + 4, grid.y + i * PITCH + 4, PITCH - 8, PITCH - 8)
            p.box(box, "hot" if met == own else "plain", radius=4)
            number = j * COUNT + i if by_columns else i * COUNT + j
            p.label(box, str(number), size=12, role="hot" if met == own else "soft")
    return grid


def loop_orders(p: Picture) -> None:
    """Version 1: keys outside. Version 2: queries outside."""
    grid = _grid(p, 30, p.say("Version 1: keys outside", "版本 1：键在外层"), True)
    for i in range(COUNT):
        box = Box(grid.right + 14, grid.y + i * PITCH + 6, 52, PITCH - 12)
        p.box(box, "o")
        p.label(box, f"O_{{{i}}} m l", size=12, role="o")
    grid = _grid(p, 396, p.say("Version 2: queries outside", "版本 2：查询在外层"), False)
    for i in range(COUNT):
        box = Box(grid.right + 10, grid.y + i * PITCH + 6, 34, PITCH - 12)
        p.box(box, "o" if i == 1 else "plain")
        p.label(box, f"O_{{{i}}}", size=12, role="o" if i == 1 else "soft")
    for left, lines in ((30, VERSION_1), (396, VERSION_2)):
        for number, (role, english, chinese) in enumerate(lines):
            at = (left, grid.bottom + 30 + 22 * number)
            p.text(at, p.say(english, chinese), role=role, size=12.5)


ROWS, DIM = 4096, 64


def moved_1(keys: float) -> float:
    """Bytes of version 1: K, V once; for each tile Q, O twice, m and l twice each."""
    return 4 * (2 * ROWS * DIM + ROWS / keys * (3 * ROWS * DIM + 4 * ROWS))


def moved_2(rows: float) -> float:
    """Bytes of version 2: Q, O, lse once; K, V for each block of so many rows."""
    return 4 * (2 * ROWS * DIM + ROWS + ROWS / rows * 2 * ROWS * DIM)


def traffic_by_memory(p: Picture) -> None:
    """Bytes moved against the numbers that the tile which stays may have."""
    area = Box(80, 50, 560, 270)
    low, high, bottom, top = 10, 18, 2, 9  # powers of two: bytes of the tile, MiB

    def at(memory: float, mib: float) -> tuple[float, float]:
        x = area.x + area.width * (math.log2(memory) - low) / (high - low)
        return x, area.bottom - area.height * (math.log2(mib) - bottom) / (top - bottom)

    for power in range(low, high + 1):
        x = at(2**power, 2**bottom)[0]
        p.line([(x, area.y), (x, area.bottom)], "faint")
        p.text((x, area.bottom + 18), str(2 ** (power - 10)), role="soft", size=12, anchor="middle")
    for power in range(bottom, top + 1):
        y = at(2**low, 2**power)[1]
        p.line([(area.x, y), (area.right, y)], "faint")
        p.text((area.x - 8, y + 4), str(2**power), role="soft", size=12, anchor="end")
    naive = (4 * 4 * ROWS * ROWS + 4 * 4 * ROWS * DIM) / 2**20
    p.line([at(2**low, naive), at(2**high, naive)], "hot", dashed=True)
    p.text((area.right - 6, at(1, naive)[1] - 8), p.say("naive", "朴素"), role="hot", anchor="end")
    for moved, role in ((moved_1, "k"), (moved_2, "q")):
        # Of a tile of keys and values, or of queries and O: 2 DIM numbers of float32 a row.
        sizes = [2 ** (low + step / 4) for step in range(4 * (high - low) + 1)]
        points = [at(size, moved(size / (8 * DIM)) / 2**20) for size in sizes]
        p.line([(x, y) for x, y in points if y >= area.y], role, bold=True)
    said = p.say(
        "MiB moved, one head of {:,} rows, d {}, float32",
        "搬运的 MiB，一个头，{:,} 行，d {}，float32",
    )
    p.text((area.x, 30), said.format(ROWS, DIM), bold=True)
    said = p.say("KiB of the tile that stays", "留在片上的 tile 的 KiB")
    p.text((area.right, area.bottom + 40), said, anchor="end")
    p.legend((area.x, area.bottom + 66), [
        ("k-cell", p.say("version 1: K, V stay", "版本 1：K、V 留下")),
        ("q-cell", p.say("version 2: Q, O stay", "版本 2：Q、O 留下")),
    ])  # fmt: skip


PICTURES: Drawings = {
    "traffic_by_memory": (404, ("Traffic against memory", "搬运量与存储大小"), traffic_by_memory),
    "loop_orders": (400, ("The two orders of the loops", "两种循环次序"), loop_orders),
}
