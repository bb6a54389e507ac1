# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Pieces of one row of queries, computed apart and merged, in the library's numbers."""

from __future__ import annotations

import numpy as np
from canvas import Box, Drawings, Picture

import fulmen

PIECES, KEYS = 4, 40


def merge(p: Picture) -> None:
    """One new row, a long cache, four thread blocks."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 1, 1, 4))
    k, v = 1.2 * rng.standard_normal((2, 1, 1, KEYS, 4))
    size = KEYS // PIECES
    pieces = [slice(first, first + size) for first in range(0, KEYS, size)]
    parts = [fulmen.attention(q, k[:, :, x], v[:, :, x], return_lse=True) for x in pieces]
    o, lse = fulmen.merge(parts)
    assert np.allclose(o, fulmen.attention(q, k, v))

    left, wide = 112, 147
    p.text((30, 52), p.say("cache", "缓存"))
    p.box(Box(30, 84, 58, 44), "q")
    p.label(Box(30, 84, 58, 44), "q", role="q", bold=True)
    p.text((59, 146), p.say("one row", "一行"), role="soft", size=12, anchor="middle")
    for number, (part_o, part_lse) in enumerate(parts):
        x = left + number * wide
        p.cells((x, 38), 13.4, [(0, c) for c in range(size)], "k-cell")
        p.arrow([(x + 67, 56), (x + 67, 82)], "k", size=6)
        at = Box(x, 84, 134, 78)
        p.box(at, "plain")
        p.label(
            at,
            p.say("thread block {}", "线程块 {}").format(number),
            f"lse = {float(part_lse.item()):.3f}",
            f"o = {part_o.ravel()[0]:.2f}, {part_o.ravel()[1]:.2f}, ...",
            bold=True,
        )
        weight = float(np.exp(part_lse - lse).item())
        y, high = 250.0, 64.0
        p.box(Box(x + 42, y - high, 50, high), "plain", radius=3)
        p.bar(Box(x + 42, y - high * weight, 50, high * weight), "hot", radius=2)
        p.text((x + 67, y + 18), f"{weight:.3f}", anchor="middle", role="hot")
        p.arrow([(x + 67, y + 26), (x + 67, y + 42), (399, y + 42), (399, y + 60)], "soft", size=6)
    p.text((30, 222), "exp(lse_{p} - lse)", role="hot", size=12.5)
    at = Box(209, 314, 380, 52)
    p.box(at, "o")
    values = ", ".join(f"{x:.2f}" for x in o.ravel()[:2])
    p.label(
        at,
        p.say("merge: o = sum of the o_{p} by these weights", "合并：按这些权重累加 o_{p}"),
        f"lse = {float(lse.item()):.3f}, o = {values}, ...",
        role="o",
        bold=True,
    )
    p.text(
        (30, 398),
        p.say(
            "The weights sum to 1. The result is that of one block over all keys.",
            "权重之和为 1。结果与一个块看过全部键时相同。",
        ),
        role="soft",
    )


PICTURES: Drawings = {
    "merge": (416, ("Pieces of a cache, merged", "缓存分段计算再合并"), merge),
}
