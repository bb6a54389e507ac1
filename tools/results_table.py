# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of bench/results for the documentation: made from the files, never typed.

    results_table.py FILE.jsonl [CASE]               prints one Markdown table
    results_table.py FILE.jsonl --columns KEY ...    prints chosen fields, a record a line

In the first, a row a sequence length (and a number of heads, where a head dim has several), a
column an (operation, head dim, mask), in a cell the rate of each party, in the order of `parties`;
the fastest is bold. Where a party has several implementations of a cell, the fastest counts. Used
by docs_tables.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from source_tree import ROOT

RESULTS = ROOT / "bench" / "results"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The records of one file."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def parties(rows: list[Row]) -> list[str]:
    """Fulmen first, then its peers by name."""
    return sorted({row["who"] for row in rows}, key=lambda who: (who != "fulmen", who))


def column(row: Row) -> tuple[str, int, bool]:
    return row["op"], row["d_qk"], row["causal"]


def cell(rows: list[Row], names: list[str], factor: float) -> str:
    """'ours / peer / peer', the fastest bold."""
    best = {who: max((r["tflops"] for r in rows if r["who"] == who), default=0.0) for who in names}
    top = max(best.values(), default=0.0)
    texts = [f"{rate * factor:.0f}" if rate else "-" for rate in best.values()]
    bold = [rate == top and rate > 0 for rate in best.values()]
    return " / ".join(f"**{text}**" if b else text for text, b in zip(texts, bold))


def line(row: Row, with_heads: bool) -> tuple[int, int]:
    return (row["heads_q"] if with_heads else 0), row["seqlen_q"]


def table(name: str, case: str = "burst") -> str:
    """The Markdown table of a file, with a line above that says what it is."""
    rows = [row for row in read(name) if row["case"] == case]
    names = parties(rows)
    columns = sorted({column(row) for row in rows}, key=lambda c: (c[0] != "forward", *c[1:]))
    with_heads = len({(row["d_qk"], row["heads_q"]) for row in rows}) > len(
        {row["d_qk"] for row in rows}
    )
    lengths = sorted({line(row, with_heads) for row in rows})
    small = max(row["tflops"] for row in rows) < 1
    factor, unit = (1e3, "GFLOP/s") if small else (1.0, "TFLOP/s")
    one = rows[0]
    said = f"{unit}, {' / '.join(names)}; {one['card']}, {one['dtype']}, `bench/results/{name}`"
    several = len({c[0] for c in columns}) > 1
    heads = [
        f"{op + ' ' if several else ''}D{dim} {'causal' if causal else 'full'}"
        for op, dim, causal in columns
    ]
    first = "heads x S" if with_heads else "S"
    lines = [said, "", f"| {first} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for count, length in lengths:
        mine = [row for row in rows if line(row, with_heads) == (count, length)]
        cells = [cell([row for row in mine if column(row) == c], names, factor) for c in columns]
        label = f"{count} x {length}" if with_heads else str(length)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def listing(name: str, *keys: str) -> str:
    """The named fields of the records of a file, in its order."""
    rows = read(name)
    unknown = [key for key in keys if not any(key in row for row in rows)]
    if unknown:
        raise ValueError(f"no record of {name} has {', '.join(unknown)}")
    said = f"{rows[0]['card']}, `bench/results/{name}`"
    heads = [key.replace("_", " ") for key in keys]
    table = [said, "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    table += ["| " + " | ".join(text_of(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(table)


def rungs(name: str) -> str:
    """A row a rung, a column an (operation, rows, head dim, heads), in milliseconds."""
    rows = read(name)
    names = list(dict.fromkeys((row["who"], row["implementation"]) for row in rows))
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    said = f"ms, medians; {rows[0]['card']}, {rows[0]['dtype']}, `bench/results/{name}`"
    heads = ["rung", *(f"{op} {s}, {d}, {h}" for op, s, d, h in shapes)]
    lines = [said, "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    of_cell = {(row["who"], row["implementation"], *_shape(row)): row["p50_ms"] for row in rows}
    for who, kernel in names:
        label = f"fulmen {kernel}" if who == "fulmen" else who
        times = [of_cell.get((who, kernel, *shape)) for shape in shapes]
        best = [min(t for key, t in of_cell.items() if key[2:] == shape) for shape in shapes]
        texts = ["-" if t is None else f"{t:.4g}" for t in times]
        cells = [f"**{x}**" if t == b else x for x, t, b in zip(texts, times, best)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shape(row: Row) -> tuple[str, int, int, int]:
    return row["op"], row["seqlen_q"], row["d_qk"], row["heads_q"]


def caches(name: str) -> str:
    """A row a cell of caches, a column a party, in microseconds; the fastest is bold."""
    rows = read(name)
    names = parties(rows)
    said = f"us, medians; {rows[0]['card']}, {rows[0]['dtype']}, `bench/results/{name}`"
    heads = ["requests x keys", "a plain read", *names]
    lines = [said, "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_cell = {row["who"]: row["p50_ms"] * 1e3 for row in rows if row["shape"] == shape}
        read_us = next(row["read_ms"] for row in rows if row["shape"] == shape) * 1e3
        best = min(of_cell.values())
        texts = ["-" if who not in of_cell else f"{of_cell[who]:.1f}" for who in names]
        bold = [f"**{x}**" if of_cell.get(who) == best else x for who, x in zip(names, texts)]
        lines.append(f"| {shape} | {read_us:.1f} | " + " | ".join(bold) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--columns" in sys.argv:
        print(listing(sys.argv[1], *sys.argv[3:]))
    else:
        print(table(*sys.argv[1:]))
