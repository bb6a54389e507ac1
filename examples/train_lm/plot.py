# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curves of train.py as an SVG, and how far each lies from the first in float32.

python examples/train_lm/plot.py curves.jsonl curves.svg

Runs may be there several times: the repeats of one show what differences are noise.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

WIDTH, LEFT, RIGHT = 760, 56, 20
CURVES, GAPS = (40, 330), (386, 486)  # top and bottom of the two panels
STYLES = {
    "torch float32": ("#222222", 2.4, ""),
    "fulmen float32": ("#e08a1e", 1.6, "6 4"),
    "torch bfloat16": ("#d1495b", 1.6, ""),
    "fulmen bfloat16": ("#1f5fd0", 1.6, "5 3"),
}


def smoothed(curve: list[float], width: int = 10) -> list[float]:
    parts = (curve[max(0, i - width + 1) : i + 1] for i in range(len(curve)))
    return [sum(part) / len(part) for part in parts]


def text(x: float, y: float, what: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{what}</text>'


def panel(
    curves: list[list[float]], styles: list[str], box: tuple, ends: tuple, spaces: int
) -> list[str]:
    """Curves between the values of `ends`, with lines that divide the panel."""
    (top, bottom), (low, high) = box, ends

    def at(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, len(curves[0]) - 1)
        y = bottom - (bottom - top) * (min(max(value, low), high) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = []
    for line in range(spaces + 1):
        value = low + (high - low) * line / spaces
        y = float(at(0, value).split(",")[1])
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{value:.3g}", 'text-anchor="end"'))
    for curve, style in zip(curves, styles):
        points = " ".join(at(*point) for point in enumerate(curve))
        parts.append(f'<polyline points="{points}" {style}/>')
    return parts


def drawn(runs: list[dict]) -> str:
    """The SVG's text."""
    runs = sorted(runs, key=lambda run: list(STYLES).index(run["run"]))
    curves = [smoothed(run["loss"]) for run in runs]
    styles = []
    for run in runs:
        colour, width, dashes = STYLES[run["run"]]
        stroke = f'fill="none" stroke="{colour}" stroke-width="{width}"'
        styles.append(f'{stroke} stroke-dasharray="{dashes}"' if dashes else stroke)
    gaps = [[x - y for x, y in zip(curve, curves[0])] for curve in curves]
    limit = math.ceil(20 * max(0.05, *(max(map(abs, gap)) for gap in gaps))) / 20
    highest = math.ceil(max(map(max, curves)))
    times: dict[str, list[float]] = {}
    for run in runs:
        times.setdefault(run["run"], []).append(run["ms"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {GAPS[1] + 44}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{GAPS[1] + 44}" fill="#ffffff"/>',
        *panel(curves, styles, CURVES, (0, highest), highest),
        *panel(gaps, styles, GAPS, (-limit, limit), 4),
    ]
    for index, (name, took) in enumerate(times.items()):
        y = CURVES[0] + 24 + 22 * index
        style = styles[[run["run"] for run in runs].index(name)]
        parts.append(f'<path d="M{WIDTH - 300} {y - 4}h30" {style}/>')
        parts.append(text(WIDTH - 262, y, f"{name}, {statistics.median(took):.1f} ms a step"))
    for part in range(5):
        step = part * (len(curves[0]) - 1) / 4
        x = LEFT + (WIDTH - LEFT - RIGHT) * part / 4
        parts.append(text(x, GAPS[1] + 18, f"{step:.0f}", 'text-anchor="middle"'))
    title = "Loss in nats per character: {rows} rows, batch {batch}, {card}".format(**runs[0])
    parts.append(text(LEFT, 22, title, 'font-size="15"'))
    parts.append(
        text(LEFT, GAPS[0] - 14, f"Difference from the first {runs[0]['run']}, mean of 10 steps")
    )
    parts.append(text(WIDTH / 2, GAPS[1] + 38, "step", 'text-anchor="middle"'))
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
