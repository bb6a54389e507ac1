# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plots of records by matplotlib: speed and memory over the sequence length, and what each
optimisation buys. Called by the commands bench and ablation, for pages (page.py) and files.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .records import Record, is_ours, rate_of

NO_PLOTS = "No plots: they need matplotlib, which pip install 'fulmen[bench]' brings."
COLOURS = {"fulmen": "#1f5fd0", "naive": "#9a9a9a"}
OTHERS = ("#d1495b", "#2a9d4e", "#e08a1e", "#7b4fb5", "#00899b", "#8c564b", "#c23ba0", "#5f7a00")


class Plot(NamedTuple):
    """One plot, ready for a page and for files."""

    name: str  # for files: letters, digits and dashes
    svg: str
    png: bytes


def _pyplot() -> Any:
    """Matplotlib without a screen; None where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    matplotlib.rcParams["svg.hashsalt"] = "fulmen"  # the same records give the same file
    return pyplot


def over_lengths(records: Sequence[Record]) -> list[Plot]:
    """Speed by sequence length, one plot a kind of cell, and memory; [] without matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return []
    plotted = [r for r in records if r["case"] != "sustained"]
    groups = sorted({_group(r) for r in plotted}, key=lambda g: (g[0] != "forward", *g[1:]))
    colours = _colours(plotted)
    unit, scale = rate_of(records)
    made = []
    for op, dtype, dim, causal in groups:
        lines = _lines([r for r in plotted if _group(r) == (op, dtype, dim, causal)], "tflops")
        lines = {who: [(x, y * scale) for x, y in points] for who, points in lines.items()}
        title = f"{op}, {dtype}, D {dim}, {'causal' if causal else 'full'}"
        made.append(_plot(pyplot, title, unit, lines, colours, False))
    naive = [r for r in plotted if r["peak_mib"] and r["op"] == "forward" and not r["causal"]]
    dims = sorted({r["d_qk"] for r in naive})
    if dims and any(r["who"] == "naive" for r in naive):
        lines = _lines([r for r in naive if r["d_qk"] == dims[0]], "peak_mib")
        title = f"memory of a forward call beside its inputs, D {dims[0]}"
        made.append(_plot(pyplot, title, "MiB", lines, colours, True))
    return made


def of_optimisations(records: Sequence[Record]) -> list[Plot]:
    """The kernels beside each other, and each less one optimisation; [] without matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return []
    unit, scale = rate_of(records)
    whole = [r for r in records if not r["without"]]
    bars = [(r["implementation"], r["tflops"] * scale) for r in whole]
    made = [_bars(pyplot, "the ladder of kernels", unit, bars)]
    for name in (r["implementation"] for r in whole):
        less = [r for r in records if r["implementation"] == name and r["without"]]
        bars = [(r["without"], r["ratio"]) for r in sorted(less, key=lambda r: -r["ratio"])]
        if bars:
            made.append(_bars(pyplot, f"{name} without", "speed, of the whole kernel's", bars))
    return made


def _bars(pyplot: Any, title: str, unit: str, bars: Sequence[tuple[str, float]]) -> Plot:
    figure, axes = pyplot.subplots(figsize=(5.6, 0.9 + 0.34 * len(bars)))
    drawn = axes.barh([name for name, _ in bars], [x for _, x in bars], color=COLOURS["fulmen"])
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.25)
    return _finished(pyplot, figure, title)


def _finished(pyplot: Any, figure: Any, title: str) -> Plot:
    figure.tight_layout()
    text, image = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    svg = text.getvalue()
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return Plot(name, svg[svg.index("<svg") :], image.getvalue())


def of_caches(records: Sequence[Record]) -> list[Plot]:
    """The bandwidth of each side, one plot a cell; [] without matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return []
    made = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        of_cell = [r for r in records if r["shape"] == shape and r["case"] != "sustained"]
        bars = [(f"{r['who']} {r['implementation']}", r["gbps"]) for r in of_cell]
        read = of_cell[0]
        ceiling = read["read_by"] if read["op"] == "append" else "a plain read"
        bars.append((ceiling, read["gbps"] * read["p50_ms"] / read["read_ms"]))
        made.append(_bars(pyplot, shape, "GB/s", bars))
    return made


def _group(r: Record) -> tuple[str, str, int, bool]:
    return r["op"], r["dtype"], r["d_qk"], r["causal"]


def _colours(records: Sequence[Record]) -> dict[str, str]:
    peers = sorted({r["who"] for r in records} - set(COLOURS))
    return {**COLOURS, **{who: OTHERS[i % len(OTHERS)] for i, who in enumerate(peers)}}


def _lines(records: Sequence[Record], key: str) -> dict[str, list[tuple[int, float]]]:
    """Points (S, figure) by party; the best of a party's implementations counts."""
    found: dict[str, dict[int, float]] = {}
    choose = max if key == "tflops" else min
    for r in records:
        if r[key] is not None:
            points = found.setdefault(r["who"], {})
            rows = r["seqlen_q"]
            points[rows] = choose(points.get(rows, r[key]), r[key])
    order = sorted(found, key=lambda who: (not is_ours(who), who))
    return {who: sorted(found[who].items()) for who in order}


def _plot(
    pyplot: Any,
    title: str,
    unit: str,
    lines: dict[str, list[tuple[int, float]]],
    colours: dict[str, str],
    log: bool,
) -> Plot:
    figure, axes = pyplot.subplots(figsize=(5.6, 3.5))
    for who, points in lines.items():
        ours = is_ours(who)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], label=who, color=colours[who],
            marker="o", markersize=5 if ours else 3.5, linewidth=2.4 if ours else 1.3,
            zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    lengths = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("sequence length")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return _finished(pyplot, figure, title)
