# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A page with plots and the table behind them, in one HTML file that loads nothing.

Every number of the table is one of the records. The plots (plots.py) are within, and beside the
page as files for other texts.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from .plots import NO_PLOTS, Plot
from .records import Record, figure, is_ours, rate_of

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
TEXTS = (
    *("op", "dtype", "causal", "option", "case", "who", "implementation", "without"),
    *("shape", "read_by"),
)
Columns = Sequence[tuple[str, str]]  # a title, and the key of a record


def columns(records: Sequence[Record]) -> Columns:
    """Of a page of `fulmen bench`."""
    return (
        ("op", "op"), ("dtype", "dtype"), ("D", "d_qk"), ("S", "seqlen_q"), ("mask", "causal"),
        ("option", "option"), ("case", "case"), ("who", "who"),
        ("implementation", "implementation"), ("p50 ms", "p50_ms"), ("p99 ms", "p99_ms"),
        (rate_of(records)[0], "tflops"), ("GB/s", "gbps"), ("peak MiB", "peak_mib"),
        ("error", "max_error"),
    )  # fmt: skip


def page(
    records: Sequence[Record], title: str, note: str, plots: Sequence[Plot], shown: Columns
) -> str:
    """The HTML text."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class=note>{html.escape(note)}</p>",
    ]
    if plots:
        parts += ["<div class=plots>", *(plot.svg for plot in plots), "</div>"]
    else:
        parts.append(f"<p class=note>{NO_PLOTS}</p>")
    return "\n".join([*parts, "<h2>All records</h2>", _table(records, shown), "</html>"])


def write(
    lines: Path, records: Sequence[Record], title: str, plots: Sequence[Plot], shown: Columns
) -> str:
    """Writes the page of a file of records beside it, and each plot as SVG and as PNG.

    Returns:
        The line that says what there is now.
    """
    one = records[0]
    told = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    note = f"{one['card']}, {one['date']}, commit {one['commit']}; {told}"
    made = lines.with_suffix(".html")
    made.write_text(page(records, title, note, plots, shown), encoding="utf-8")
    for plot in plots:
        drawn = lines.with_name(f"{lines.stem}-{plot.name}.svg")
        drawn.write_text(plot.svg, encoding="utf-8")
        drawn.with_suffix(".png").write_bytes(plot.png)
    if not plots:
        return f"written: {lines} and .html. {NO_PLOTS}"
    return f"written: {lines}, .html and {len(plots)} plots as .svg and .png"


def _table(records: Sequence[Record], shown: Columns) -> str:
    def cell(tag: str, key: str, text: str) -> str:
        kind = " class=text" if key in TEXTS else ""
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    scale = rate_of(records)[1]
    head = "".join(cell("th", key, name) for name, key in shown)
    rows = []
    for record in records:
        kind = " class=ours" if is_ours(record["who"]) else ""
        scaled = {**record, "tflops": record["tflops"] * scale}
        cells = "".join(cell("td", key, figure(scaled.get(key))) for _, key in shown)
        rows.append(f"<tr{kind}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
