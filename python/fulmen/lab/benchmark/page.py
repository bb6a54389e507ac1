# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A page with plots and the table behind them, in one HTML file that loads nothing.

Plots are inline SVG by matplotlib. Every number of the table is one of the records.
"""

from __future__ import annotations

import html
import io
from typing import Any

from .records import is_ours

Record = dict[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #888; position: sticky; top: 0; background: #fff; }
td.text, th.text { text-align: left; } tr.ours td { background: #f3f7ff; }
p.note { color: #555; }
"""
COLUMNS = (
    ("op", "op"), ("dtype", "dtype"), ("D", "d_qk"), ("S", "seqlen_q"), ("mask", "causal"),
    ("option", "option"), ("case", "case"), ("who", "who"),
    ("implementation", "implementation"), ("p50 ms", "p50_ms"),
    ("p99 ms", "p99_ms"), ("TFLOP/s", "tflops"), ("GB/s", "gbps"), ("peak MiB", "peak_mib"),
    ("error", "max_error"),
)  # fmt: skip
TEXTS = ("op", "dtype", "causal", "option", "case", "who", "implementation")
COLOURS = {"fulmen": "#1f5fd0", "naive": "#9a9a9a"}
OTHERS = ("#d1495b", "#2a9d4e", "#e08a1e", "#7b4fb5", "#00899b", "#8c564b", "#c23ba0", "#5f7a00")


def page(records: list[Record], title: str, note: str) -> str:
    """The HTML text."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class=note>{html.escape(note)}</p>",
    ]
    plots = _plots(records)
    if plots:
        parts += ["<div class=plots>", *plots, "</div>"]
    else:
        parts.append("<p class=note>No plots: matplotlib is not installed.</p>")
    return "\n".join([*parts, "<h2>All records</h2>", _table(records), "</html>"])


def figure(value: Any) -> str:
    """A number for people."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "causal" if value else "full"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(records: list[Record]) -> str:
    def cell(tag: str, key: str, text: str) -> str:
        kind = " class=text" if key in TEXTS else ""
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", key, name) for name, key in COLUMNS)
    rows = []
    for record in records:
        kind = " class=ours" if is_ours(record["who"]) else ""
        cells = "".join(cell("td", key, figure(record[key])) for _, key in COLUMNS)
        rows.append(f"<tr{kind}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _plots(records: list[Record]) -> list[str]:
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        return []
    matplotlib.rcParams["svg.hashsalt"] = "fulmen"  # the same records give the same file
    plotted = [r for r in records if r["case"] != "sustained"]
    groups = sorted({_group(r) for r in plotted}, key=lambda g: (g[0] != "forward", *g[1:]))
    colours = _colours(plotted)
    small = max((r["tflops"] for r in plotted), default=0.0) < 1
    unit = "GFLOP/s" if small else "TFLOP/s"
    made = []
    for op, dtype, dim, causal in groups:
        lines = _lines([r for r in plotted if _group(r) == (op, dtype, dim, causal)], "tflops")
        if small:
            lines = {who: [(x, y * 1e3) for x, y in points] for who, points in lines.items()}
        title = f"{op}, {dtype}, D {dim}, {'causal' if causal else 'full'}"
        made.append(_plot(pyplot, title, unit, lines, colours, False))
    naive = [r for r in plotted if r["peak_mib"] and r["op"] == "forward" and not r["causal"]]
    dims = sorted({r["d_qk"] for r in naive})
    if dims and any(r["who"] == "naive" for r in naive):
        lines = _lines([r for r in naive if r["d_qk"] == dims[0]], "peak_mib")
        title = f"memory of a forward call beside its inputs, D {dims[0]}"
        made.append(_plot(pyplot, title, "MiB", lines, colours, True))
    return made


def _group(r: Record) -> tuple[str, str, int, bool]:
    return r["op"], r["dtype"], r["d_qk"], r["causal"]


def _colours(records: list[Record]) -> dict[str, str]:
    peers = sorted({r["who"] for r in records} - set(COLOURS))
    return {**COLOURS, **{who: OTHERS[i % len(OTHERS)] for i, who in enumerate(peers)}}


def _lines(records: list[Record], key: str) -> dict[str, list[tuple[int, float]]]:
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
) -> str:
    figure_, axes = pyplot.subplots(figsize=(5.6, 3.5))
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
    figure_.tight_layout()
    text = io.StringIO()
    figure_.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure_)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
