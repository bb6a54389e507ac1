# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grids of caches in `fulmen bench`: each call one replay of a CUDA graph after a flush of the
L2, among plain reads of as many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from fulmen.lab.benchmark import peers_caches
from fulmen.lab.benchmark.cache_sides import (
    CacheTruth,
    FulmenApart,
    FulmenCaches,
    random_caches,
)
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.plots import Plot, of_caches
from fulmen.lab.benchmark.read_peak import ReadPeak
from fulmen.lab.benchmark.records import figure
from fulmen.lab.benchmark.sides import Side
from fulmen.lab.benchmark.timing import Times
from fulmen.options import implementations

from .benches import Benches, error_text
from .output import BadInputError

# By name; each makes its side from the path of the operators of FlashAttention-3, or None.
PEERS: dict[str, Callable[[Any], Side]] = {
    "cudnn": lambda path: peers_caches.SdpaCaches("cudnn", "CUDNN_ATTENTION"),
    "fa2": lambda path: peers_caches.SdpaCaches("fa2", "FLASH_ATTENTION"),
    "flash-attn": lambda path: peers_caches.FlashAttention2Caches(),
    "fa3": lambda path: peers_caches.FlashAttention3Caches(path, False),
    "fa3+meta": lambda path: peers_caches.FlashAttention3Caches(path, True),
    "fa4": lambda path: peers_caches.FlashAttention4Caches(),
    "flashinfer": lambda path: peers_caches.FlashInferCaches(),
    "cudnn-paged": lambda path: peers_caches.CudnnPages(),
}
READ = "plain read: "  # what its names begin with, among the sides


class CacheBench(Benches):
    """Sides over caches."""

    graph_calls = 1  # a second one would find the cache in the L2

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(PEERS)

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        if arguments.precision:
            raise BadInputError("--precision is for float32; caches are timed in 16 bits")
        known = ("auto", *implementations(self.backend))
        asked = [x for x in arguments.implementation or ["auto"] if x in known]
        is_mixed = "mixed" in (arguments.grid or ())
        return [side(x) for x in asked for side in (FulmenCaches, FulmenApart)[: 1 + is_mixed]]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if name not in PEERS:
            raise MissingError(f"caches are timed beside {', '.join(PEERS)}")
        return PEERS[name](fa3_path)

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        caches = random_caches(cell, self.torch, self.device)
        return caches, CacheTruth(cell, caches, self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        self.peak = self.peak or ReadPeak(self.torch)
        return {READ + name: call for name, call in self.peak.calls(cell.array_bytes).items()}

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        read = min((name for name in times if name.startswith(READ)), key=lambda n: times[n].median)
        return {
            "shape": cell.shape, "page": cell.page, "kv_total": sum(cell.kv_lengths),
            "read_ms": times[read].median * 1e3, "read_by": read[len(READ) :],
            "of_read": times[read].median / mine.median,
        }  # fmt: skip

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        titles = ("who", "kernel", "us", "p99 us", "GB/s", "% of read", "error")
        for (shape, read), found in groupby(records, lambda r: (r["shape"], r["read_ms"])):
            each = list(found)
            rows = [
                (r["who"], r["implementation"], f"{r['p50_ms'] * 1e3:.1f}",
                 f"{r['p99_ms'] * 1e3:.1f}", f"{r['gbps']:.0f}", f"{100 * r['of_read']:.0f}",
                 error_text(r["max_error"]))
                for r in each
            ]  # fmt: skip
            told = f"a plain read {figure(read * 1e3)} us"
            yield f"{each[0]['dtype']} {shape}; {told}", titles, rows

    def plots(self, records: list[dict[str, Any]]) -> list[Plot]:
        return of_caches(records)

    def columns(self, records: list[dict[str, Any]]) -> Sequence[tuple[str, str]]:
        return (
            ("dtype", "dtype"), ("cell", "shape"), ("who", "who"),
            ("implementation", "implementation"), ("p50 ms", "p50_ms"), ("p99 ms", "p99_ms"),
            ("GB/s", "gbps"), ("of read", "of_read"), ("read ms", "read_ms"),
            ("read by", "read_by"), ("host us", "host_us"), ("error", "max_error"),
        )  # fmt: skip
