# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rates beside the peers of the same run, from a file of bench/results."""

from __future__ import annotations

import json
import math
from pathlib import Path

from canvas import Box, Drawings, Picture

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
FORWARD = "2026-11-28-forward-nvidia-h200.jsonl"
WHO = {
    "fulmen": ("q", "fulmen"),
    "fa3": ("v", "FlashAttention-3"),
    "cudnn": ("k", "cuDNN"),
    "fa2": ("o", "FlashAttention-2"),
}
Curve = dict[int, float]  # rows -> TFLOP/s


def curves(name: str) -> dict[tuple[int, bool, str], Curve]:
    """(head dim, causal, who) -> rates of a run; the fastest where a party has several."""
    found: dict[tuple[int, bool, str], Curve] = {}
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["case"] == "burst":
            curve = found.setdefault((row["d_qk"], row["causal"], row["who"]), {})
            rows, rate = row["seqlen_q"], row["tflops"]
            curve[rows] = max(rate, curve.get(rows, 0.0))
    return found


def forward_rates(p: Picture) -> None:
    """Six panels: full and causal, three head dims; a line a party."""
    rates = curves(FORWARD)
    top = 100 * math.ceil(max(max(curve.values()) for curve in rates.values()) / 100)
    for row, causal in enumerate((False, True)):
        for column, dim in enumerate((64, 128, 256)):
            area = Box(62 + column * 220, 66 + row * 216, 192, 150)
            mask = p.say("causal", "因果") if causal else p.say("full", "无掩码")
            p.text((area.x, area.y - 14), f"d {dim}, {mask}", bold=True)
            _axes(p, area, sorted(rates[dim, causal, "fulmen"]), top, first=column == 0)
            for who in reversed(WHO):  # fulmen over the others
                _curve(p, area, rates.get((dim, causal, who), {}), WHO[who][0], top)
    p.legend((62, 494), [(f"{role}-cell", name) for role, name in WHO.values()])
    p.text(
        (62, 520),
        p.say(
            "TFLOP/s over rows of a sequence, 16,384 tokens, bfloat16, all in one run on an H200.",
            "TFLOP/s 随序列行数的变化，16,384 个 token，bfloat16，H200 上同一次运行。",
        ),
        role="soft",
        size=12.5,
    )


def _place(area: Box, rows: int, rate: float, top: float) -> tuple[float, float]:
    x = area.x + area.width * math.log2(rows / 512) / math.log2(16384 / 512)
    return x, area.bottom - area.height * rate / top


def _axes(p: Picture, area: Box, lengths: list[int], top: int, *, first: bool) -> None:
    for rate in range(0, top + 1, 200):
        y = _place(area, 512, rate, top)[1]
        p.line([(area.x, y), (area.right, y)], "faint")
        if first:
            p.text((area.x - 8, y + 4), str(rate), role="soft", size=12, anchor="end")
    for rows in lengths[::2]:
        words = str(rows) if rows < 1024 else f"{rows // 1024}k"
        x = _place(area, rows, 0, top)[0]
        p.text((x, area.bottom + 17), words, role="soft", size=12, anchor="middle")


def _curve(p: Picture, area: Box, curve: Curve, role: str, top: float) -> None:
    points = [_place(area, rows, rate, top) for rows, rate in sorted(curve.items())]
    if not points:
        return
    p.line(points, role, bold=role == "q")
    for x, y in points if role == "q" else ():
        p.bar(Box(x - 3, y - 3, 6, 6), role)


PICTURES: Drawings = {
    "forward_rates": (
        540,
        ("Rates of the forward pass on an H200", "H200 上前向计算的速率"),
        forward_rates,
    ),
}
