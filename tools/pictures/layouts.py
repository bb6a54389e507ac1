# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How rows and heads lie in memory, and which query heads share a head of keys."""

from __future__ import annotations

import numpy as np
from canvas import Box, Drawings, Picture

ROLES = ("q", "v", "o")


def layouts(p: Picture) -> None:
    """Four ways to keep 4 rows of 3 heads, each with the strides that a call is given."""
    rows, heads, dim = 4, 3, 64
    element = np.dtype(np.float16).itemsize
    fused = np.empty((1, rows, 3, heads, dim), np.float16)
    arrays = [
        (
            "bhsd",
            p.say("each head by itself", "每个头单独存放"),
            np.empty((1, heads, rows, dim), np.float16),
        ),
        (
            "bshd",
            p.say("all heads of a row side by side", "同一行的所有头并排"),
            np.empty((1, rows, heads, dim), np.float16).transpose(0, 2, 1, 3),
        ),
        (
            "shd",
            p.say(
                "packed, cu_q = [0, 1, 4]: 1 row, then 3",
                "打包，cu_q = [0, 1, 4]：先 1 行，再 3 行",
            ),
            np.empty((rows, heads, dim), np.float16).transpose(1, 0, 2)[None],
        ),
        (
            "bshd",
            p.say("q of a fused qkv: a view with gaps", "qkv 合一数组中的 q：带间隔的视图"),
            fused[:, :, 0].transpose(0, 2, 1, 3),
        ),
    ]
    width, left = 30.0, 44
    for number, (layout, words, q) in enumerate(arrays):
        y = 34 + number * 96
        stride = [size // element for size in q.strides]
        head_step, row_step = stride[1], stride[2]
        shown = p.text((left, y), f'layout="{layout}"', mono=True, bold=True)
        p.text((shown.right + 18, y), words, role="soft")
        span = rows * row_step // dim if row_step > head_step else rows * heads
        shrink = min(1.0, 632 / (span * width))
        for cell in range(span):
            at = Box(left + cell * width * shrink, y + 14, width * shrink - 2, 26)
            p.bar(at, "faint")
        for head in range(heads):
            for row in range(rows):
                cell = (head * head_step + row * row_step) // dim
                at = Box(left + cell * width * shrink, y + 14, width * shrink - 2, 26)
                p.box(at, ROLES[head], radius=3)
                if shrink == 1.0:
                    p.label(at, str(row), size=12.5, role=ROLES[head])
        said = p.say(
            "a head further: {} elements, a row further: {}",
            "下一个头：{} 个元素，下一行：{} 个元素",
        ).format(head_step, row_step)
        p.text((left, y + 59), said, size=12.5, role="soft")
    p.legend(
        (left, 428),
        [(f"{role}-cell", p.say(f"head {head}", f"头 {head}")) for head, role in enumerate(ROLES)],
    )
    p.text(
        (676, 428),
        p.say("numbers are rows; a cell is 64 elements", "数字是行号；每格 64 个元素"),
        role="soft",
        anchor="end",
    )


def heads(p: Picture) -> None:
    """Eight query heads over 8, 2 and 1 heads of keys and values."""
    heads_q, wide = 8, 222
    for number, (name, heads_kv) in enumerate([("MHA", 8), ("GQA", 2), ("MQA", 1)]):
        left = 40 + number * wide
        group = heads_q // heads_kv
        p.text((left, 38), name, bold=True, size=15)
        p.text((left + 46, 38), f"heads_q=8, heads_kv={heads_kv}", size=12, mono=False, role="soft")
        for head in range(heads_q):
            at = Box(left + head * 25, 58, 21, 30)
            p.box(at, "q", radius=4)
            p.label(at, str(head), size=12.5, role="q")
        for g in range(heads_kv):
            first, last = left + g * group * 25, left + (g + 1) * group * 25 - 4
            middle = (first + last) / 2
            for head in range(g * group, (g + 1) * group):
                x = left + head * 25 + 10.5
                p.line([(x, 91), (x, 104), (middle, 124), (middle, 137)], "soft")
            at = Box(middle - 10.5, 140, 21, 30)
            p.box(at, "k", radius=4)
            p.label(at, str(g), size=12.5, role="k")
        share = p.say("cache: {:.3g} of MHA's", "缓存：MHA 的 {:.3g}").format(heads_kv / heads_q)
        p.text((left, 199), share, size=12.5, role="soft")
    p.legend(
        (40, 236),
        [
            ("q-cell", p.say("query head h", "查询头 h")),
            (
                "k-cell",
                p.say(
                    "head of keys and values, g = h // (heads_q // heads_kv)",
                    "键/值头 g = h // (heads_q // heads_kv)",
                ),
            ),
        ],
    )


PICTURES: Drawings = {
    "layouts": (446, ("Layouts of q in memory", "q 在内存中的布局"), layouts),
    "heads": (256, ("Query heads that share keys", "共用键的查询头"), heads),
}
