# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid `latent` of `fulmen bench`: each call one replay of a CUDA graph after a flush of the
L2, among plain reads of as many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import fulmen
from fulmen.lab.benchmark.latent_sides import (
    FlashMla,
    FulmenLatent,
    LatentTruth,
    known_peer,
    random_latents,
)
from fulmen.lab.benchmark.plots import of_caches
from fulmen.lab.benchmark.read_peak import ReadPeak
from fulmen.lab.benchmark.records import figure
from fulmen.lab.benchmark.sides import Side
from fulmen.lab.benchmark.timing import Times

from .benches import ServingBench, error_text

READ = "plain read: "  # what its names begin with, among the sides
PEERS = (FlashMla.name,)


class LatentBench(ServingBench):
    """Sides over a latent cache."""

    plots = staticmethod(of_caches)
    figures = (("GB/s", "gbps"), ("of read", "of_read"), ("read ms", "read_ms"))

    @property
    def defaults(self) -> tuple[str, ...]:
        return PEERS

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        return [FulmenLatent()]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        return known_peer(name)

    def compile(self, cells: Sequence[Any]) -> None:
        """The kernels of cells, each by a call: lengths and lists may be any."""
        with self.output.progress("compiling kernels", len(cells)) as advance:
            for cell in cells:
                with suppress(fulmen.Error):  # it says so in its own cell
                    mine: Any = self.sides[0]
                    mine.answer(cell, random_latents(cell, self.torch, self.device)).call()
                advance(1)

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        latents = random_latents(cell, self.torch, self.device)
        return latents, LatentTruth(cell, latents, self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        self.peak = self.peak or ReadPeak(self.torch)
        return {READ + name: call for name, call in self.peak.calls(cell.array_bytes).items()}

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        read = min((name for name in times if name.startswith(READ)), key=lambda n: times[n].median)
        return {
            "shape": cell.shape, "page": cell.page, "read_ms": times[read].median * 1e3,
            "read_by": read[len(READ) :], "of_read": times[read].median / mine.median,
        }  # fmt: skip

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        titles = ("who", "kernel", "us", "p99 us", "TFLOP/s", "x read", "error")
        for (shape, read), group in groupby(records, lambda r: (r["shape"], r["read_ms"])):
            each = list(group)
            rows = [
                (r["who"], r["implementation"], f"{r['p50_ms'] * 1e3:.1f}",
                 f"{r['p99_ms'] * 1e3:.1f}", f"{r['tflops']:.0f}", f"{1 / r['of_read']:.3f}",
                 error_text(r["max_error"]))
                for r in each
            ]  # fmt: skip
            told = f"a plain read {figure(read * 1e3)} us"
            yield f"{each[0]['dtype']} {shape}; {told}", titles, rows
