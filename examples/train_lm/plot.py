# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curves of train.py as an SVG.

python examples/train_lm/plot.py curves.jsonl curves.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 56, 40, 20, 48
STYLES = {
    "torch float32": ("#222222", 4.0, ""),
    "fulmen float32": ("#e08a1e", 1.6, "6 4"),
    "torch bfloat16": ("#9a9a9a", 1.6, ""),
    "fulmen bfloat16": ("#1f5fd0", 1.6, ""),
}


def smoothed(curve: list[float], width: int = 10) -> list[float]:
    parts = (curve[max(0, i - width + 1) : i + 1] for i in range(len(curve)))
    return [sum(part) / len(part) for part in parts]


def drawn(runs: list[dict]) -> str:
    """The SVG's text."""
    steps = max(len(run["loss"]) for run in runs)
    top = max(max(smoothed(run["loss"])) for run in runs)

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / (steps - 1)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for loss in range(int(top) + 1):
        _, y = at(0, loss)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for part in range(5):
        step = part * (steps - 1) / 4
        x, y = at(step, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{step:.0f}</text>')
    for index, run in enumerate(runs):
        colour, width, dashes = STYLES.get(run["run"], ("#d1495b", 1.6, ""))
        points = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in enumerate(smoothed(run["loss"])))
        line = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{points}" {line}/>')
        y = TOP + 24 + 22 * index
        parts.append(f'<path d="M{WIDTH - 300} {y - 4}h30" {line}/>')
        label = f"{run['run']}, {run['ms']:.1f} ms a step"
        parts.append(f'<text x="{WIDTH - 262}" y="{y}">{label}</text>')
    title = "Loss in nats per character: {rows} rows, batch {batch}, {card}".format(**runs[0])
    parts.append(f'<text x="{LEFT}" y="22" font-size="15">{title}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("python examples/train_lm/plot.py curves.jsonl curves.svg")
        return 2
    runs = [json.loads(line) for line in Path(arguments[0]).read_text().splitlines()]
    Path(arguments[1]).write_text(drawn(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
