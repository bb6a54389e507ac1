# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensor cores: which lane has which number of a product, and where vectors lie in a tile."""

from __future__ import annotations

from canvas import Box, Drawings, Picture

ROLES = ("q", "k", "v", "o")  # of the lanes of a quad


def _lanes_of_d() -> dict[tuple[int, int], int]:
    """(row, column) of a 16 x 8 accumulator -> lane."""
    return {(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2): lane
            for lane in range(32) for i in range(4)}  # fmt: skip


def fragments(p: Picture) -> None:
    """An accumulator of 16 x 8, and how two of them become an A of the next product."""
    pitch, left, top = 25, 40, 62
    said = p.say("D, 16 x 8: the lane of each number", "D，16 x 8：每个数属于哪个 lane")
    p.text((left, 34), said, bold=True)
    for (row, column), lane in _lanes_of_d().items():
        box = Box(left + column * pitch + 1, top + row * pitch + 1, pitch - 2, pitch - 2)
        role = ROLES[lane % 4]
        p.box(box, role, radius=3)
        p.label(box, str(lane), size=11, role=role, bold=lane == 5)
    p.text((left, top + 16 * pitch + 24), p.say("lane 5: rows 1 and 9, columns 2 and 3",
           "lane 5：第 1、9 行，第 2、3 列"), role="k", size=12.5)  # fmt: skip
    left, pitch = 330, 21
    english, chinese = (
        "two D side by side, packed: an A, 16 x 16",
        "两个 D 并排，打包后就是 16 x 16 的 A",
    )
    p.text((left, 34), p.say(english, chinese), bold=True)
    of_lane_5 = [place for place, lane in _lanes_of_d().items() if lane == 5]
    own = {
        (row, column + 8 * number): f"a{2 * number + row // 8}"
        for number in range(2)
        for row, column in of_lane_5
    }
    others = [(row, column) for row in range(16) for column in range(16)]
    p.cells((left, top), pitch, [place for place in others if place not in own], "hidden")
    for (row, column), word in own.items():
        box = Box(left + column * pitch + 1, top + row * pitch + 1, pitch - 2, pitch - 2)
        p.box(box, ROLES[1], radius=3)
        p.label(box, word, size=11, role=ROLES[1], bold=True, mono=True)
    y = top + 16 * pitch + 24
    p.text((left, y), p.say("P never leaves the registers:", "P 从不离开寄存器："), size=12.5)
    p.text((left, y + 22), p.say("what S leaves in a lane is what P V needs there.",
           "S 留在一个 lane 里的，正是 P V 在那里需要的。"), size=12.5)  # fmt: skip


def swizzle(p: Picture) -> None:
    """Eight rows of eight vectors, as they are and with vector ^ row."""
    pitch, top = 34, 74
    for left, swizzled in ((40, False), (390, True)):
        title = (
            p.say("vector ^ row % 8", "向量号 ^ 行号 % 8") if swizzled else p.say("plain", "不重排")
        )
        p.text((left, 34), title, bold=True)
        for group in range(8):
            words = f"{4 * group}-{4 * group + 3}"
            p.text(
                (left + group * pitch + pitch / 2, 64), words, size=11, role="soft", anchor="middle"
            )
        met = set()
        for row in range(8):
            for vector in range(8):
                place = vector ^ row if swizzled else vector
                own = vector == 2
                if own:
                    met.add(place)
                box = Box(left + place * pitch + 2, top + row * pitch + 2, pitch - 4, pitch - 4)
                p.box(box, "hot" if own else "plain", radius=4)
                p.label(box, str(vector), size=12.5, role="hot" if own else "soft", bold=own)
        said = p.say("wavefronts for vector 2 of 8 rows: {}", "读 8 行的向量 2 的 wavefront：{}")
        p.text((left, top + 8 * pitch + 26), said.format(8 // len(met)), role="hot", size=12.5)
    said = p.say(
        "Above: the banks of each place. A vector is 16 bytes.",
        "上方：各位置的存储体。一个向量为 16 字节。",
    )
    p.text((40, top + 8 * pitch + 52), said, role="soft", size=12.5)


PICTURES: Drawings = {
    "fragments": (510, ("Fragments of mma.sync", "mma.sync 的 fragment"), fragments),
    "swizzle": (412, ("The swizzle of a tile", "tile 的 swizzle"), swizzle),
}
