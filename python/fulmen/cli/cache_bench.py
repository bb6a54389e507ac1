# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grids of caches in `fulmen bench`, among plain reads of as many bytes: on a GPU each call one
replay of a CUDA graph after a flush of the L2; on the CPU also among products in registers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from fulmen.lab.benchmark import cpu_peaks, peers_caches
from fulmen.lab.benchmark.cache_cells import CacheGrid
from fulmen.lab.benchmark.cache_ratios import ratios
from fulmen.lab.benchmark.cache_sides import WAYS, CacheTruth, FulmenCaches, random_caches
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.plots import of_caches
from fulmen.lab.benchmark.read_peak import ReadPeak
from fulmen.lab.benchmark.records import figure
from fulmen.lab.benchmark.sides import Side
from fulmen.lab.benchmark.timing import Times
from fulmen.options import implementations

from .benches import ServingBench, error_text
from .output import BadInputError, Output

# By name; each makes its side from the path of the operators of FlashAttention-3, or None.
PEERS: dict[str, Callable[[Any], Side]] = {
    "cudnn": lambda path: peers_caches.SdpaCaches("cudnn", "CUDNN_ATTENTION"),
    "fa2": lambda path: peers_caches.SdpaCaches("fa2", "FLASH_ATTENTION"),
    "flash-attn": lambda path: peers_caches.FlashAttention2Caches(),
    "fa3": lambda path: peers_caches.FlashAttention3Caches(path, False),
    "fa3+meta": lambda path: peers_caches.FlashAttention3Caches(path, True),
    "fa4": lambda path: peers_caches.FlashAttention4Caches(),
    "flashinfer": lambda path: peers_caches.FlashInferCaches(),
    "flashinfer-cascade": lambda path: peers_caches.FlashInferCascade(),
    "cudnn-paged": lambda path: peers_caches.CudnnPages(),
}
CPU_PEERS: dict[str, Callable[[Any], Side]] = {
    "fa2": lambda path: peers_caches.SdpaCaches("torch", "FLASH_ATTENTION"),
    "torch-grouped": lambda path: peers_caches.GroupedSdpaCaches(),
}
LOOP = "products in registers alone"
READ = "plain read: "  # what its names begin with, among the sides


class CacheBench(ServingBench):
    """Sides over caches."""

    plots = staticmethod(of_caches)
    figures = (
        ("GB/s", "gbps"), ("of read", "of_read"), ("read ms", "read_ms"), ("read by", "read_by"),
    )  # fmt: skip

    def __init__(self, grid: CacheGrid, arguments: argparse.Namespace, output: Output) -> None:
        """For a grid, which says in what ways fulmen is called."""
        self.grid = grid
        super().__init__(grid.backend, arguments, output)

    @property
    def defaults(self) -> tuple[str, ...]:
        is_cascade = "cascade" in self.grid.ways
        return tuple(x for x in self.known if is_cascade or x != "flashinfer-cascade")

    @property
    def known(self) -> dict[str, Callable[[Any], Side]]:
        """The peers of the backend."""
        return CPU_PEERS if self.backend == "cpu" else PEERS

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        if arguments.precision:
            raise BadInputError("--precision is for float32; caches are timed in 16 bits")
        known = ("auto", *implementations(self.backend))
        asked = [x for x in arguments.implementation or ["auto"] if x in known]
        ways = [FulmenCaches, *(WAYS[name] for name in self.grid.ways)]
        return [side(x) for x in asked for side in ways]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if self.torch is None:
            raise MissingError("torch is not installed")
        if name not in self.known:
            raise MissingError(f"caches are timed beside {', '.join(self.known)}")
        return self.known[name](fa3_path)

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        caches = random_caches(cell, self.torch, self.device)
        return caches, CacheTruth(cell, caches, self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        if not cell.graph:  # on the CPU
            read, self.loop = cpu_peaks.reading(cell.array_bytes), cpu_peaks.arithmetic(cell.dtype)
            return {READ + "in order": read.call, LOOP: self.loop.call}
        self.peak = self.peak or ReadPeak(self.torch)
        return {READ + name: call for name, call in self.peak.calls(cell.array_bytes).items()}

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        read = min((name for name in times if name.startswith(READ)), key=lambda n: times[n].median)
        found = {
            "shape": cell.shape, "page": cell.page, "kv_total": sum(cell.kv_lengths),
            "is_even": cell.is_even, "packed": bool(cell.q_lengths),
            "read_ms": times[read].median * 1e3, "read_by": read[len(READ) :],
            "of_read": times[read].median / mine.median,
        }  # fmt: skip
        if LOOP in times:  # the least time in which it can be computed
            found["peak_tflops"] = self.loop.amount / times[LOOP].median / 1e12
            computed = cell.flops / found["peak_tflops"] / 1e12
            found["of_bound"] = max(times[read].median, computed) / mine.median
        return found

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        has_bound = any("of_bound" in r for r in records)
        share = "% of bound" if has_bound else "x read"
        titles = ("who", "kernel", "us", "p99 us", "GB/s", share, "error")
        for (shape, read), group in groupby(records, lambda r: (r["shape"], r["read_ms"])):
            each = list(group)
            rows = [
                (r["who"], r["implementation"], f"{r['p50_ms'] * 1e3:.1f}",
                 f"{r['p99_ms'] * 1e3:.1f}", f"{r['gbps']:.0f}",
                 f"{100 * r['of_bound']:.0f}" if has_bound else f"{1 / r['of_read']:.3f}",
                 error_text(r["max_error"]))
                for r in each
            ]  # fmt: skip
            told = f"a plain read {figure(read * 1e3)} us"
            yield f"{each[0]['dtype']} {shape}; {told}", titles, rows
        found = [(x.what, x.shape, f"{x.times:.3f}") for x in ratios(records)]
        if found:
            yield "ratios within this run", ("times of", "cell", "ratio"), found
