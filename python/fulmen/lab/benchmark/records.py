# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A record: one side's figures in one cell, with everything that they depend on."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulmen

from . import machine
from .cells import Cell
from .timing import Times

Record = dict[str, Any]


class Run:
    """What the records of one run of a benchmark have in common."""

    def __init__(self, backend: str) -> None:
        """On the processor or the GPU of this machine."""
        self.card = machine.processor() if backend == "cpu" else machine.card()
        self.versions = machine.versions(backend)
        self.commit = fulmen.build_info()["commit"]
        self.date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

    def record(
        self, cell: Cell, who: str, implementation: str, times: Times, case: str, calls: int = 1
    ) -> Record:
        """Times of a side that answers the cell `calls` times a timed call."""
        seconds = times.median / calls
        return {
            "grid": cell.grid, "op": cell.op, "who": who,
            "implementation": implementation, "dtype": cell.dtype, "batch": cell.batch,
            "heads_q": cell.heads, "heads_kv": cell.kv_heads, "seqlen_q": cell.rows,
            "seqlen_kv": cell.kv_rows, "d_qk": cell.dim, "d_v": cell.dim, "causal": cell.causal,
            "option": cell.option, "case": case,
            "p50_ms": seconds * 1e3, "p99_ms": times.p99 / calls * 1e3,
            "tflops": cell.flops / seconds / 1e12, "gbps": cell.array_bytes / seconds / 1e9,
            "peak_mib": None, "max_error": None, "card": self.card, "clock_mhz": None,
            "versions": self.versions, "commit": self.commit, "date": self.date,
        }  # fmt: skip


def is_ours(who: str) -> bool:
    """Whether a side is fulmen, with whatever it was asked for: "fulmen", "fulmen 3xtf32"."""
    return who.split()[0] == "fulmen"


def rate_of(records: Sequence[Record]) -> tuple[str, float]:
    """The unit that people read the `tflops` of these records in, and the factor to it."""
    on_cpu = all("isa" in (r["versions"] or {}) for r in records)
    return ("GFLOP/s", 1e3) if on_cpu else ("TFLOP/s", 1.0)


def figure(value: Any) -> str:
    """A number for people."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "causal" if value else "full"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_lines(folder: Path, name: str, records: list[Record]) -> Path:
    """Writes DATE-NAME-CARD.jsonl, one record a line."""
    folder.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", records[0]["card"].lower()).strip("-")
    path = folder / f"{records[0]['date']}-{name}-{card}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
