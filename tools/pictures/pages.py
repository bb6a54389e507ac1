# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches in pages: which pages requests have, and how a page lies in memory."""

from __future__ import annotations

import numpy as np
from canvas import Box, Drawings, Picture

PAGE = 4  # rows
TABLES = [[5, 2, 0], [5, 2, 3], [1]]  # pages of three requests; the first two begin alike
LENGTHS = [11, 9, 3]
ROLES = ("q", "v", "o")


def tables(p: Picture) -> None:
    """Three requests, their tables, and the pool: shared pages, rows past a length, free pages."""
    pool = {page: request for request, pages in enumerate(TABLES) for page in pages}
    shared = set(TABLES[0]) & set(TABLES[1])
    top, cell = 232, 24
    place = {}
    for page in range(7):
        at = Box(28 + page * 97, top, 84, 40)
        place[page] = at
        role = "hot" if page in shared else ROLES[pool[page]] if page in pool else "plain"
        for row in range(PAGE):
            box = Box(at.x + row * 21, at.y, 19, 30)
            users = [r for r, pages in enumerate(TABLES) if page in pages]
            used = any(TABLES[r].index(page) * PAGE + row < LENGTHS[r] for r in users)
            p.box(box, role if used else "plain", radius=3, dashed=not used)
        p.text((at.middle[0] - 2, at.y + 48), str(page), size=12.5, anchor="middle", role="soft")
    for request, pages in enumerate(TABLES):
        left, y = 28 + request * 234, 56
        name = p.say("request {}: {} keys", "请求 {}：{} 个键").format(request, LENGTHS[request])
        p.text((left, y - 14), name, bold=True)
        entries = [*map(str, pages), *["*"] * (3 - len(pages))]
        for column, entry in enumerate(entries):
            box = Box(left + column * 38, y, 34, cell + 4)
            is_used = column < len(pages)
            p.box(box, ROLES[request] if is_used else "plain", radius=4, dashed=not is_used)
            p.label(box, entry, size=13, role=ROLES[request] if is_used else "soft", mono=True)
            if is_used:
                target = place[pages[column]]
                x = target.middle[0] - 2 + (request - 1) * 8
                p.arrow([(box.middle[0], box.bottom + 3), (x, target.y - 5)], "soft", size=6)
    p.text((28, top + 78), p.say("the pool: pages of 4 rows", "页池：每页 4 行"), role="soft")
    p.legend(
        (28, top + 106),
        [
            ("hot-cell", p.say("shared by requests 0 and 1", "请求 0 与 1 共用")),
            ("plain-dashed", p.say("never read: any content", "从不读取：内容任意")),
        ],
    )
    note = p.say("*: never followed", "*：从不跟随")
    p.text((676, top + 106), note, role="soft", anchor="end", mono=False)


def pools(p: Picture) -> None:
    """One page of 4 rows and 2 heads in three layouts, with the strides that a call is given."""
    pages, heads, dim = 8, 2, 64
    fused = np.empty((pages, 2, PAGE, heads, dim), np.float16)
    arrays = [
        ("bshd", p.say("(page, row, head, dim)", "(页, 行, 头, 维)"),
         np.empty((pages, PAGE, heads, dim), np.float16).transpose(0, 2, 1, 3)),
        ("bhsd", p.say("(page, head, row, dim)", "(页, 头, 行, 维)"),
         np.empty((pages, heads, PAGE, dim), np.float16)),
        ("bshd", p.say("keys of a page, then its values: two views of one pool",
                       "一页的键，然后是它的值：同一个池的两个视图"),
         fused[:, 0].transpose(0, 2, 1, 3)),
    ]  # fmt: skip
    left, width = 28, 39.0
    for number, (layout, words, k) in enumerate(arrays):
        y = 34 + number * 96
        page_step, head_step, row_step = (size // 2 for size in k.strides[:3])
        shown = p.text((left, y), f'layout="{layout}"', mono=True, bold=True)
        p.text((shown.right + 18, y), words, role="soft")
        for cell in range(page_step // dim):
            p.bar(Box(left + cell * width, y + 14, width - 2, 26), "faint")
        for head in range(heads):
            for row in range(PAGE):
                cell = (head * head_step + row * row_step) // dim
                at = Box(left + cell * width, y + 14, width - 2, 26)
                p.box(at, ROLES[head], radius=3)
                p.label(at, str(row), size=12.5, role=ROLES[head])
        said = p.say(
            "a page further: {} elements, a head: {}, a row: {}",
            "下一页：{} 个元素，下一个头：{}，下一行：{}",
        ).format(page_step, head_step, row_step)
        p.text((left, y + 59), said, size=12.5, role="soft")
    p.legend(
        (left, 330),
        [(f"{role}-cell", p.say(f"head {n}", f"头 {n}")) for n, role in enumerate(ROLES[:2])],
    )
    p.text(
        (676, 330),
        p.say(
            "numbers are rows of the page; a cell is 64 elements", "数字是页内行号；每格 64 个元素"
        ),
        role="soft",
        anchor="end",
    )


PICTURES: Drawings = {
    "page_tables": (356, ("Requests, tables and pages", "请求、页表与页"), tables),
    "page_layouts": (348, ("Layouts of a page in memory", "页在内存中的布局"), pools),
}
