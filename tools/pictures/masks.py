# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Masks, as `fulmen.dense_mask` says them: single entries, blocks of keys, packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from canvas import Box, Drawings, Picture

import fulmen
from fulmen import masks

ROWS, KEYS = 6, 9


def _where(matrix: Any) -> list[tuple[int, int]]:
    return [(int(row), int(column)) for row, column in np.argwhere(matrix)]


def masks_of_options(p: Picture) -> None:
    """What each option hides, for 6 queries and 9 keys."""
    ids = masks.documents(np.array([0, 0, 1, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 1, 2, 2]))
    options: list[tuple[str, dict[str, Any]]] = [
        ("causal=True", {"causal": True}),
        ("causal, top_left", {"causal": True, "alignment": "top_left"}),
        ("window=(2, 1)", {"window": (2, 1)}),
        ("causal, window=2", {"causal": True, "window": 2}),
        ("causal, masks.prefix(6)", {"causal": True, "mask": masks.prefix(6)}),
        ("masks.chunks(3)", {"mask": masks.chunks(3)}),
        ("masks.documents(ids)", {"mask": ids}),
        ("causal, masks.documents(ids)", {"causal": True, "mask": ids}),
        ("kv_lengths=[7]", {"kv_lengths": np.array([7])}),
    ]
    pitch, wide, high = 19, 228, 172
    for number, (words, given) in enumerate(options):
        x, y = 42 + number % 3 * wide, 48 + number // 3 * high
        seen = np.reshape(fulmen.dense_mask(ROWS, KEYS, **given), (ROWS, KEYS))
        shift = 0 if "alignment" in given else KEYS - ROWS
        own = np.arange(ROWS)[:, None] + shift == np.arange(KEYS)
        p.text((x, y - 12), words, size=12.5, mono=True)
        p.cells((x, y), pitch, _where(~seen), "hidden")
        p.cells((x, y), pitch, _where(seen & ~own), "q-cell")
        p.cells((x, y), pitch, _where(seen & own), "k-cell")
    p.text(
        (32, 48 + ROWS * pitch / 2),
        p.say("query i", "查询 i"),
        role="soft",
        anchor="middle",
        size=12,
        turned=True,
    )
    p.text(
        (42 + KEYS * pitch / 2, 48 + ROWS * pitch + 17),
        p.say("key j", "键 j"),
        role="soft",
        anchor="middle",
        size=12,
    )
    p.legend(
        (42, 547),
        [
            ("q-cell", p.say("visible", "可见")),
            (
                "k-cell",
                p.say(
                    "visible, at the row's own position p = i + shift",
                    "可见，且位于该行自身的位置 p = i + shift",
                ),
            ),
            ("hidden", p.say("hidden", "隐藏")),
        ],
    )


def blocks_of_keys(p: Picture) -> None:
    """Which blocks of keys a tile of queries skips, takes whole, or looks into."""
    rows, tile = 32, 4
    ids = np.repeat(np.arange(3), [10, 14, 8])
    options: list[tuple[str, dict[str, Any]]] = [
        ("causal=True", {"causal": True}),
        ("causal, window=9", {"causal": True, "window": 9}),
        ("causal, masks.documents(ids)", {"causal": True, "mask": masks.documents(ids)}),
    ]
    pitch, left, top, wide = 6.25, 30, 48, 230
    for number, (words, given) in enumerate(options):
        x = left + number * wide
        seen = np.reshape(fulmen.dense_mask(rows, rows, **given), (rows, rows))
        p.text((x, top - 12), words, size=12, mono=True)
        counts = {"full": 0, "edge": 0, "skipped": 0}
        for row in range(0, rows, tile):
            for column in range(0, rows, tile):
                block = seen[row : row + tile, column : column + tile]
                kind = "full" if block.all() else "edge" if block.any() else "skipped"
                counts[kind] += 1
                at = Box(x + column * pitch + 0.75, top + row * pitch + 0.75, 23.5, 23.5)
                if kind == "full":
                    p.bar(at, "v")
                elif kind == "edge":
                    p.box(at, "k", radius=3)
                    p.cells((at.x, at.y), pitch - 0.375, _where(block), "k-cell")
                else:
                    p.cells((at.x - 1, at.y - 1), 25.5, [(0, 0)], "hidden")
        p.text(
            (x, top + rows * pitch + 22),
            p.say("{full} whole, {edge} on an edge", "{full} 块全部可见，{edge} 块在边缘").format(
                **counts
            ),
            role="soft",
        )
        p.text(
            (x, top + rows * pitch + 41),
            p.say("{skipped} of 64 never visited", "64 块中有 {skipped} 块从不访问").format(
                **counts
            ),
            role="soft",
        )
    p.legend(
        (left, top + rows * pitch + 78),
        [
            (
                "v-cell",
                p.say("every row sees all keys: no comparison", "每行都看得到全部键：无需比较"),
            ),
            ("k-cell", p.say("compared entry by entry", "逐项比较")),
            ("hidden", p.say("not visited", "不访问")),
        ],
    )


def packed_sequences(p: Picture) -> None:
    """Three sequences, padded to the longest of them and packed one after the other."""
    lengths, roles = [5, 2, 7], ["q", "v", "o"]
    pitch, left = 22, 40
    p.text(
        (left, 38), p.say("Padded: q_lengths = [5, 2, 7]", "填充：q_lengths = [5, 2, 7]"), bold=True
    )
    for entry, (length, role) in enumerate(zip(lengths, roles, strict=True)):
        y = 54 + entry * pitch
        p.text((left - 8, y + 15), str(entry), role="soft", anchor="end", size=12)
        p.cells((left, y), pitch, [(0, c) for c in range(length)], f"{role}-cell")
        p.cells((left, y), pitch, [(0, c) for c in range(length, max(lengths))], "hidden")
    p.text((left, 142), p.say("7 of 21 rows hold nothing.", "21 行中有 7 行是空的。"), role="soft")

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    x = 340
    p.text((x, 38), p.say("Packed: one row after the other", "打包：首尾相接"), bold=True)
    for begin, length, role in zip(offsets, lengths, roles, strict=False):
        p.cells((x, 54), pitch, [(0, int(begin) + c) for c in range(length)], f"{role}-cell")
    for offset in offsets:
        at = x + offset * pitch
        p.line([(at, 52), (at, 86)], "soft")
        p.text((at, 101), str(offset), anchor="middle", size=12, mono=True)
    p.text((x, 128), f"cu_q = {offsets.tolist()}", mono=True)

    ids = masks.documents(np.repeat(np.arange(3), lengths))
    seen = fulmen.dense_mask(14, 14, causal=True, mask=ids)
    top = 172
    small = 17
    for begin, length, role in zip(offsets, lengths, roles, strict=False):
        own = np.zeros_like(seen)
        own[begin : begin + length] = seen[begin : begin + length]
        p.cells((x, top), small, _where(own), f"{role}-cell")
    p.cells((x, top), small, _where(~seen), "hidden")
    p.text(
        (left, top + 16),
        p.say(
            "What it means, with causal=True:\neach sequence sees itself alone,\n"
            "its causal mask begins at its own\nfirst row. No such matrix is made:\n"
            "blocks of keys outside the own\nsequence are never visited.",
            "加上 causal=True 的含义：\n每个序列只看得到自己，\n因果掩码从它自己的第一行开始。\n"
            "这个矩阵从不构造：\n自身序列之外的键块从不访问。",
        ),
        bold=True,
    )


PICTURES: Drawings = {
    "masks": (566, ("Masks of nine options", "九种选项的掩码"), masks_of_options),
    "blocks_of_keys": (
        348,
        ("Blocks of keys under three masks", "三种掩码下的键块"),
        blocks_of_keys,
    ),
    "packed_sequences": (
        434,
        ("Padded and packed sequences", "填充与打包的序列"),
        packed_sequences,
    ),
}
