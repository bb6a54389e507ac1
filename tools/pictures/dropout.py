# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which probabilities dropout removes: one Philox call for eight keys of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from canvas import Box, Drawings, Picture

import fulmen

SEED, OFFSET, PROBABILITY = 7, 0, 0.25
ROWS, KEYS = 6, 32
SHOWN = (5, 1)  # row and group of eight keys whose numbers are printed


def philox(counter: list[int], key: int) -> list[int]:
    """Philox4x32-10 (Salmon et al., SC 2011), the text of src/kernels/attention/dropout.cuh."""
    low, mask = [key & 0xFFFFFFFF, key >> 32], 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ low[0],
            second & mask,
            first >> 32 ^ counter[3] ^ low[1],
            first & mask,
        ]
        low = [(low[0] + 0x9E3779B9) & mask, (low[1] + 0xBB67AE85) & mask]
    return counter


def kept_by_the_library() -> Any:
    """(ROWS, KEYS), True where a probability stays: all are equal, and v picks each apart."""
    q, k = np.zeros((1, 1, ROWS, 1), np.float32), np.zeros((1, 1, KEYS, 1), np.float32)
    v = np.eye(KEYS, dtype=np.float32)[None, None]
    return fulmen.attention(q, k, v, dropout_p=PROBABILITY, rng=(SEED, OFFSET))[0, 0] > 0


LEFT, TOP, PITCH = 50.0, 66.0, 19.0


def _pattern(p: Picture, kept: Any) -> None:
    """Rows and keys, those of a call of the generator together."""
    for group in range(KEYS // 8):
        x = LEFT + group * (8 * PITCH + 8)
        for row in range(ROWS):
            own = kept[row, 8 * group : 8 * group + 8]
            at = (x, TOP + row * PITCH)
            p.cells(at, PITCH, [(0, int(c)) for c in np.flatnonzero(own)], "q-cell")
            p.cells(at, PITCH, [(0, int(c)) for c in np.flatnonzero(~own)], "hidden")
        p.text(
            (x + 4 * PITCH, TOP - 12),
            p.say("keys {} to {}", "键 {} 到 {}").format(8 * group, 8 * group + 7),
            role="soft",
            size=12,
            anchor="middle",
        )
    for row in range(ROWS):
        p.text((LEFT - 10, TOP + row * PITCH + 14), str(row), role="soft", size=12, anchor="end")
    p.text(
        (LEFT, 32),
        p.say("One call of Philox for each box of eight keys", "每八个键一格，调用一次 Philox"),
        bold=True,
    )


def dropout(p: Picture) -> None:
    """The pattern of six rows and 32 keys, and the numbers behind eight of them."""
    kept = kept_by_the_library()
    _pattern(p, kept)
    row, group = SHOWN
    x = LEFT + group * (8 * PITCH + 8)
    p.box(Box(x - 2, TOP + row * PITCH - 2, 8 * PITCH + 4, PITCH + 4), "hot", dashed=True)
    words = philox([group, row, 0, OFFSET], SEED)
    p.arrow([(x + 4 * PITCH, TOP + (row + 1) * PITCH + 4), (x + 4 * PITCH, 218)], "hot", size=6)
    at = Box(50, 222, 632, 50)
    p.box(at, "plain")
    p.label(
        at,
        f"philox4x32_10(counter = (j / 8 = {group}, i = {row}, batch * heads + head = 0, "
        f"offset = {OFFSET}), key = seed = {SEED})",
        size=12.5,
    )
    threshold = int(PROBABILITY * 65536 + 0.5)
    draws = [words[lane // 2] >> 16 * (lane % 2) & 0xFFFF for lane in range(8)]
    assert [draw >= threshold for draw in draws] == kept[row, 8 * group : 8 * group + 8].tolist()
    step = 632 / 4
    for number, word in enumerate(words):
        x = LEFT + number * step
        p.arrow([(x + step / 2, 276), (x + step / 2, 292)], "soft", size=6)
        p.label(Box(x, 294, step, 20), f"{word:08x}", mono=True, size=13)
        for half in (0, 1):
            lane = 2 * number + half
            stays = draws[lane] >= threshold
            at = Box(x + 6 + half * (step / 2 - 2), 322, step / 2 - 10, 46)
            p.box(at, "q" if stays else "plain")
            p.label(
                at,
                p.say("key {}", "键 {}").format(8 * group + lane),
                f"{draws[lane]}",
                role="q" if stays else "plain",
                bold=True,
                size=12.5,
            )
    p.text(
        (50, 398),
        p.say(
            "16 bits for each key. Those below {} = {} * 65536 are dropped (grey), what stays is\n"
            "multiplied by 1 / (1 - p). No tile and no thread takes part in the decision.",
            "每个键 16 位。小于 {} = {} * 65536 的被丢弃（灰色），保留的乘以 1 / (1 - p)。\n"
            "分块和线程都不影响这个决定。",
        ).format(threshold, PROBABILITY),
        role="soft",
    )


PICTURES: Drawings = {
    "dropout": (438, ("Dropout by counter", "由计数器决定的 dropout"), dropout),
}
