# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a cache keeps of a token, and what is done with each byte of it."""

from __future__ import annotations

import math

from canvas import Box, Drawings, Picture

HEADS, DIM, GROUPS, LATENT, ROTATED = 128, 128, 8, 512, 64
RIDGE = 989 / 4.8  # operations for each byte that an H200 can do


def kinds() -> list[tuple[str, int, float]]:
    """Name, numbers of a token, operations for each byte in 16 bits."""
    found = [(name, 2 * kept * DIM, HEADS / kept)
             for name, kept in (("MHA", HEADS), ("GQA", GROUPS), ("MQA", 1))]  # fmt: skip
    row = LATENT + ROTATED
    return [*found, ("MLA", row, HEADS * (row + LATENT) / row)]


def cache_per_token(p: Picture) -> None:
    """Two columns of bars: numbers a token, operations a byte; each on a logarithmic scale."""
    head = p.say("{} query heads of {}, one layer", "{} 个查询头，每头 {}，一层")
    p.text((30, 34), head.format(HEADS, DIM), bold=True)
    p.text((100, 70), p.say("numbers a token", "每个 token 的数"), role="k")
    p.text((420, 70), p.say("operations a byte, decoding", "解码时每字节的运算"), role="q")
    notes = {
        "MHA": p.say("keys and values of every head", "每个头各有键和值"),
        "GQA": p.say("of {} heads", "{} 个头的键和值").format(GROUPS),
        "MQA": p.say("of one head", "一个头的键和值"),
        "MLA": p.say("one row of {} + {}", "一行 {} + {}").format(LATENT, ROTATED),
    }
    for number, (name, count, intensity) in enumerate(kinds()):
        y = 88 + 62 * number
        p.text((84, y + 17), name, anchor="end", bold=True)
        width = 150 * math.log2(count / 128) / math.log2(32768 / 128)
        p.bar(Box(100, y, width, 24), "k")
        p.text((100 + width + 8, y + 17), f"{count:,}", size=12.5)
        p.text((100, y + 42), notes[name], role="soft", size=12)
        width = 190 * (1 + math.log2(intensity)) / (1 + math.log2(256))
        p.bar(Box(420, y, width, 24), "q")
        p.text((690, y + 17), f"{intensity:.0f}", size=12.5, anchor="end")
    x = 420 + 190 * (1 + math.log2(RIDGE)) / (1 + math.log2(256))
    p.line([(x, 82), (x, 330)], "hot", dashed=True)
    words = p.say("an H200 can do {:.0f}", "H200 能做 {:.0f}").format(RIDGE)
    p.text((x, 346), words, role="hot", size=12.5, anchor="middle")
    p.text((30, 372), p.say("Logarithmic scales.", "对数刻度。"), role="soft", size=12.5)


PICTURES: Drawings = {
    "cache_per_token": (
        388,
        ("What a cache keeps of a token", "缓存为每个 token 保留什么"),
        cache_per_token,
    ),
}
