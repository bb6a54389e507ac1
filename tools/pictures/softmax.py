# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The online softmax: a tile that walks over the keys, and what a row knows after each block."""

from __future__ import annotations

import numpy as np
from canvas import Box, Drawings, Picture

SCORES = np.array([[1.0, 2.0, 0.5], [0.0, 1.5, 1.0], [3.5, 2.0, 1.0], [0.5, 3.0, -1.0]])
VALUES = np.array(
    [
        [1, 0],
        [2, 1],
        [0, 3],
        [1, 1],
        [4, 2],
        [0, 0],
        [2, 4],
        [1, 3],
        [3, 0],
        [1, 2],
        [0, 1],
        [2, 2],
    ],
    float,
).reshape(4, 3, 2)


def online_softmax(p: Picture) -> None:
    """One row of queries, four blocks of three keys: m, l and O after each of them."""
    columns = {"s": 46, "m": 238, "f": 306, "p": 398, "l": 566, "o": 640}
    heads = [
        ("s", p.say("scores S of a block", "一个块的得分 S"), 58),
        ("m", "m", 0),
        ("f", "exp(m_{old} - m)", 20),
        ("p", "P = exp(S - m)", 58),
        ("l", "l", 0),
        ("o", "O", 0),
    ]
    for key, words, shift in heads:
        p.text(
            (columns[key] + shift, 36),
            words,
            anchor="middle" if shift or key in "mlo" else "start",
            bold=True,
        )
    m, l, O = -np.inf, 0.0, np.zeros(2)
    for j, (S, V) in enumerate(zip(SCORES, VALUES, strict=True)):
        y = 54 + j * 66
        new = max(m, float(S.max()))
        rescale = float(np.exp(m - new))
        P = np.exp(S - new)
        l = l * rescale + float(P.sum())
        O = O * rescale + P @ V
        grew = new > m
        m = new
        p.text((columns["s"] - 12, y + 25), f"{j}", anchor="end", role="soft", size=12.5)
        for column, (score, weight) in enumerate(zip(S, P, strict=True)):
            at = Box(columns["s"] + column * 40, y, 36, 36)
            p.box(at, "k", radius=5)
            p.label(at, f"{score:g}", size=13, role="k")
            x = columns["p"] + column * 40
            p.bar(Box(x, y + 36 - 26 * weight, 36, max(26 * weight, 1.0)), "q", radius=2)
            p.text((x + 18, y + 51), f"{weight:.2f}", anchor="middle", size=12, role="q")
        p.arrow([(columns["s"] + 124, y + 18), (columns["m"] - 24, y + 18)], "soft", size=6)
        role = "hot" if grew else "plain"
        p.box(Box(columns["m"] - 20, y, 40, 36), role)
        p.label(Box(columns["m"] - 20, y, 40, 36), f"{m:g}", role=role, bold=True)
        p.text(
            (columns["f"] + 20, y + 23),
            f"{rescale:.3f}" if 0 < rescale < 1 else f"{rescale:g}",
            anchor="middle",
            role=role,
        )
        p.label(Box(columns["l"] - 30, y, 60, 36), f"{l:.3f}", bold=True)
        p.box(Box(columns["o"] - 42, y, 94, 36), "o")
        p.label(Box(columns["o"] - 42, y, 94, 36), f"{O[0]:.2f}, {O[1]:.2f}", role="o")
    whole = np.exp(SCORES - SCORES.max()).ravel()
    assert np.allclose(O / l, whole / whole.sum() @ VALUES.reshape(-1, 2))
    y = 334
    p.line([(34, y), (692, y)], "faint")
    p.text(
        (34, y + 26),
        p.say(
            "O / l = ({:.4f}, {:.4f}): the softmax over all twelve keys at once gives the same.",
            "O / l = ({:.4f}, {:.4f})：对全部十二个键一次做 softmax，结果相同。",
        ).format(*(O / l)),
    )
    p.text(
        (34, y + 50),
        p.say(
            "Where m grows (red), l and O are multiplied by exp(m_{old} - m) "
            "before the block is added.",
            "m 增大处（红色），先把 l 和 O 乘以 exp(m_{old} - m)，再加入该块。",
        ),
        role="soft",
    )


def tiles(p: Picture) -> None:
    """Scores exist for one tile at a time, while blocks of keys and values pass by."""
    left, top, pitch = 190, 128, 52
    q_tiles, k_blocks, at_q, at_k = 4, 7, 1, 3
    wide, high = k_blocks * pitch, q_tiles * pitch
    p.box(Box(left - 4, top - 4, wide + 8, high + 8), "plain", dashed=True)
    for j in range(k_blocks):
        for i in range(q_tiles):
            at = Box(left + j * pitch + 3, top + i * pitch + 3, pitch - 6, pitch - 6)
            if i == at_q and j == at_k:
                p.box(at, "hot")
                p.label(at, "S, P", role="hot", bold=True)
            elif i == at_q and j < at_k:
                p.bar(at, "faint")
        on = j == at_k
        for row, (name, role) in enumerate([("K", "k"), ("V", "v")]):
            at = Box(left + j * pitch + 3, 40 + row * 38, pitch - 6, 30)
            p.box(at, role if on else "plain")
            p.label(at, f"{name}_{{{j}}}", role=role if on else "plain", bold=on)
    for i in range(q_tiles):
        for name, role, x in (("Q", "q", left - 84), ("O", "o", left + wide + 22)):
            at = Box(x, top + i * pitch + 3, 58, pitch - 6)
            p.box(at, role if i == at_q else "plain")
            p.label(at, f"{name}_{{{i}}}", role=role if i == at_q else "plain", bold=i == at_q)
    y = top + at_q * pitch + pitch / 2
    p.arrow([(left - 22, y), (left - 5, y)], "q")
    p.arrow([(left + (at_k + 1) * pitch + 4, y), (left + wide - 6, y)], "soft", dashed=True)
    column = left + at_k * pitch + pitch / 2
    p.arrow([(column, 112), (column, top + at_q * pitch)], "k")
    p.text(
        (left + wide / 2, top + high + 27),
        p.say("the matrix of all scores: never in memory", "全部得分的矩阵：从不出现在内存中"),
        role="soft",
        anchor="middle",
    )
    p.text((100, 60), p.say("blocks of keys", "键块"), anchor="middle", role="k")
    p.text((100, 98), p.say("and of values", "值块"), anchor="middle", role="v")
    y = top + high + 48
    p.box(Box(40, y, 640, 74), "plain")
    p.text(
        (58, y + 30),
        p.say("On the chip, for one tile of rows:", "片上，每个由若干行组成的 tile："),
        bold=True,
    )
    p.text(
        (58, y + 54),
        p.say(
            "Q_{1}, one block K_{3} and V_{3}, the scores S, P, and per row m, l and the sums O",
            "Q_{1}，一个块的 K_{3} 和 V_{3}，得分 S、P，以及每行的 m、l 和累加的 O",
        ),
    )


PICTURES: Drawings = {
    "online_softmax": (
        404,
        ("The online softmax in numbers", "逐步进行的 softmax，用数字说明"),
        online_softmax,
    ),
    "tiles": (482, ("A tile of queries walks over the keys", "一个查询 tile 走过所有的键"), tiles),
}
