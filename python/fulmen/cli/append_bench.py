# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid `append` of `fulmen bench`: rows into caches, each call one replay of a CUDA graph after
a flush of the L2, among copies of as many bytes and graphs that do nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import fulmen
from fulmen.lab.benchmark.append_sides import (
    AppendTruth,
    FlashInferAppend,
    FulmenAppend,
    IndexCopy,
    random_rows,
)
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.plots import of_caches
from fulmen.lab.benchmark.records import figure
from fulmen.lab.benchmark.sides import Side
from fulmen.lab.benchmark.timing import Times

from .benches import ServingBench, error_text

PEERS: dict[str, Callable[[], Side]] = {"torch": IndexCopy, "flashinfer": FlashInferAppend}
COPY = "a copy"
EMPTY = "an empty graph"


class AppendBench(ServingBench):
    """Sides that write rows into pages."""

    plots = staticmethod(of_caches)
    figures = (("copy ms", "read_ms"), ("of copy", "of_read"), ("empty graph ms", "empty_ms"))

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(PEERS)

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        return [FulmenAppend()]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if name not in PEERS:
            raise MissingError(f"appended rows are timed beside {', '.join(PEERS)}")
        return PEERS[name]()

    def compile(self, cells: Sequence[Any]) -> None:
        """The kernels of cells, each by a call for one row: whose they are says no length."""
        every = dict.fromkeys(replace(cell, rows=1) for cell in cells)
        ours: Any = self.sides[0]
        with self.output.progress("compiling kernels", len(every)) as advance:
            for cell in every:
                with suppress(fulmen.Error):  # it says so in its own cell
                    ours.answer(cell, random_rows(cell, self.torch, self.device)).call()
                advance(1)

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        rows = random_rows(cell, self.torch, self.device)
        return rows, AppendTruth(cell, rows, self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        a, b = (
            self.torch.empty(cell.array_bytes // 2, dtype=self.torch.uint8, device=self.device)
            for _ in range(2)
        )
        return {COPY: lambda: b.copy_(a), EMPTY: lambda: None}

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        copy, empty = times[COPY].median, times[EMPTY].median
        return {
            "shape": cell.shape, "page": cell.page, "read_ms": copy * 1e3, "read_by": COPY,
            "of_read": copy / mine.median, "empty_ms": empty * 1e3,
        }  # fmt: skip

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        titles = ("who", "kernel", "us", "p99 us", "above empty", "% of copy", "error")
        for (shape, copy, empty), found in groupby(
            records, lambda r: (r["shape"], r["read_ms"], r["empty_ms"])
        ):
            each = list(found)
            rows = [
                (r["who"], r["implementation"], f"{r['p50_ms'] * 1e3:.2f}",
                 f"{r['p99_ms'] * 1e3:.2f}", f"{(r['p50_ms'] - empty) * 1e3:.2f}",
                 f"{100 * r['of_read']:.0f}", error_text(r["max_error"]))
                for r in each
            ]  # fmt: skip
            told = f"a copy {figure(copy * 1e3)} us, an empty graph {figure(empty * 1e3)}"
            yield f"{each[0]['dtype']} {shape}; {told}", titles, rows
