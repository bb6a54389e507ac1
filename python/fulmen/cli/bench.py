# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen bench: speed, memory and error over a grid of shapes, beside other libraries."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import fulmen
from fulmen.lab.benchmark import cpu_peaks, page, peers_onnx, peers_other, peers_torch
from fulmen.lab.benchmark.append_cells import APPEND_GRIDS, AppendGrid
from fulmen.lab.benchmark.cache_cells import CACHE_GRIDS, HEADS, QUANTISED_BYTES, CacheGrid
from fulmen.lab.benchmark.cells import GRIDS, ITEM_BYTES, Asked, Cell, Grid
from fulmen.lab.benchmark.expression_cells import EXPRESSION_GRIDS
from fulmen.lab.benchmark.fma_peak import FmaPeak, MatrixProduct
from fulmen.lab.benchmark.latent_cells import LATENT_GRIDS
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.plots import Plot, over_lengths
from fulmen.lab.benchmark.records import figure, is_ours, rate_of, write_lines
from fulmen.lab.benchmark.reference import Truth
from fulmen.lab.benchmark.sides import Fulmen, NaiveNumpy, Side, random_tensors
from fulmen.lab.benchmark.timing import Times
from fulmen.options import implementations, names_of

from .append_bench import PEERS as APPEND_PEERS
from .append_bench import AppendBench
from .arguments import positive
from .benches import Benches, error_text
from .cache_bench import CPU_PEERS, CacheBench
from .cache_bench import PEERS as CACHE_PEERS
from .expression_bench import PEERS as EXPRESSION_PEERS
from .expression_bench import ExpressionBench
from .latent_bench import PEERS as LATENT_PEERS
from .latent_bench import LatentBench
from .output import ACCEPTABLE, BadInputError, Output

# By name; each makes its side when it is asked for.
PEERS: dict[str, Callable[[], Side]] = {
    "cudnn": lambda: peers_torch.Sdpa("cudnn", "CUDNN_ATTENTION"),
    "fa2": lambda: peers_torch.Sdpa("fa2", "FLASH_ATTENTION"),
    "efficient": lambda: peers_torch.Sdpa("efficient", "EFFICIENT_ATTENTION"),
    "math": lambda: peers_torch.Sdpa("math", "MATH"),
    "flex": peers_torch.Flex,
    "fa3": lambda: peers_other.FlashAttention("fa3", "flash_attn_interface"),
    "fa4": lambda: peers_other.FlashAttention("fa4", "flash_attn.cute"),
    "flashinfer": peers_other.FlashInfer,
    "xformers": peers_other.Xformers,
    "ort-mha": lambda: peers_onnx.OnnxRuntime("ort-mha", "MultiHeadAttention"),
    "ort-gqa": lambda: peers_onnx.OnnxRuntime("ort-gqa", "GroupQueryAttention"),
    "naive": peers_torch.NaiveTorch,
}
DEFAULT_PEERS = {
    "cuda": ("cudnn", "fa2", "fa3", "fa4", "efficient", "flashinfer", "xformers", "naive"),
    "cpu": ("fa2", "math", "ort-mha", "ort-gqa", "naive"),
}
SERVING_GRIDS: dict[str, CacheGrid | AppendGrid] = {**CACHE_GRIDS, **APPEND_GRIDS}
FMA_PEAK = "multiply-adds alone"  # a call beside the sides of a float32 cell
LOOP = "products in registers alone"  # of a cell on the CPU
PRODUCT = "a matrix product alone"  # likewise, of a cell on the CPU, by torch
TORCH_CPU_NAME = "torch"  # SDPA on the CPU has one kernel, which torch calls flash attention
DESCRIPTION = """\
Times fulmen and other libraries on the same arrays, in one run, in random order with idle gaps and
a flushed cache: only ratios within a cell count. With --output one JSON object a line, and a page
with plots, which are also there as SVG and PNG: they need matplotlib, pip install 'fulmen[bench]'.
A library that is not installed is one line; it stops nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    grids = (*GRIDS, *SERVING_GRIDS, *EXPRESSION_GRIDS, *LATENT_GRIDS)
    add("--grid", choices=grids, action="append",
        help="forward, options, backward, training, float32, small, decode, paged, mixed, cascade, "
        "append, latent, expressions (GPU), cpu, cpu-decode; else forward, or cpu")  # fmt: skip
    add("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="of the default grid")
    add("--rows", type=positive, nargs="+", metavar="S", help="these sequence lengths")
    add("--dims", type=positive, nargs="+", metavar="D", help="these head dims")
    add("--heads", type=positive, nargs="+", metavar="H", help="so many heads; 2048 / head dim")
    add("--batch", type=positive, metavar="B", help="so many sequences; 16384 / their length")
    add("--groups", type=positive, nargs="+", metavar="G",
        help="of caches: query heads that share keys; 4")  # fmt: skip
    add("--page-sizes", type=positive, nargs="+", metavar="P",
        help="paged: these; 16 64 1; mixed, cascade, append: 16")  # fmt: skip
    add("--dtype", choices=(*ITEM_BYTES, *QUANTISED_BYTES), nargs="+", metavar="NAME",
        help=f"instead of the grid's: {', '.join(ITEM_BYTES)}; of caches on a GPU also "
        f"{', '.join(QUANTISED_BYTES)}")  # fmt: skip
    add("--implementation", action="extend", nargs="+", choices=names_of("implementation"),
        metavar="NAME", help="of fulmen; several are several rows; auto")  # fmt: skip
    add("--precision", action="extend", nargs="+", choices=names_of("precision"), metavar="NAME",
        help="float32, tf32, 3xtf32: of float32; fp8: of 16 bits; several rows")  # fmt: skip
    every = tuple(
        dict.fromkeys(
            (*PEERS, *CACHE_PEERS, *CPU_PEERS, *APPEND_PEERS, *EXPRESSION_PEERS, *LATENT_PEERS)
        )
    )
    add("--peers", nargs="*", choices=every, metavar="NAME",
        help=f"others beside fulmen, of {', '.join(every)}; without names: none")  # fmt: skip
    add("--fa3-operators", metavar="PATH", help="FlashAttention-3 from its shared library")
    add("--sustained", action="store_true", help="also back to back on a hot card (GPU)")
    add("--rounds", type=positive, default=5, metavar="N", help="rounds of each side; 5")
    add(
        "--seconds", type=float, default=math.inf, metavar="T", help="begin no cell after T seconds"
    )
    add("--tune", type=Path, metavar="FILE", help="instead of a grid: search tiles of the Hopper "
        "forward for --rows and --dims, and write those that beat the rules as JSON")  # fmt: skip
    add("-o", "--output", type=Path, metavar="FOLDER",
        help="write DATE-GRID-CARD.jsonl, .html and plots there; the name also carries "
        "--implementation and --precision")  # fmt: skip


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    if arguments.tune is not None:
        return _tune(arguments, output)
    names = arguments.grid or [_default_grid(arguments.backend)]
    records: list[dict[str, Any]] = []
    start = time.perf_counter()
    for name in names:
        bench, cells = _asked(name, arguments, output)
        found = []
        bench.compile(cells)
        with output.progress(f"grid {name}", len(cells)) as advance:
            bench.say = lambda now: advance(0, now)
            for cell in cells:
                if time.perf_counter() - start > arguments.seconds:
                    output.line(f"stopped after {arguments.seconds:g} s; not timed: {cell.name}")
                    break
                found += bench.run(cell)
                advance(1)
        for title, columns, rows in bench.tables(found):
            output.line(title)
            output.table(columns, rows, lambda row: ACCEPTABLE if is_ours(row[0]) else "")
            output.line()
        for line in bench.missing.values():
            output.line(line)
        if arguments.output is not None and found:
            named = (*(arguments.implementation or ()), *(arguments.precision or ()))
            write(bench, arguments.output, "-".join((name, *named)), found, output)
        records += found
    if output.as_json:
        output.json(records)
    return int(not any(is_ours(r["who"]) for r in records))


def _default_grid(backend: str) -> str:
    if backend == "auto":
        backend = "cuda" if fulmen.gpu_info()["devices"] else "cpu"
    return "cpu" if backend == "cpu" else "forward"


def _asked(
    name: str, arguments: argparse.Namespace, output: Output
) -> tuple[Benches, Sequence[Cell]]:
    """A grid by name: what runs it, and its cells.

    Raises:
        BadInputError: words that the grid does not know, or heads that do not divide.
    """
    a = arguments
    if not isinstance(GRIDS.get(name), Grid):
        for flag, given in (("--heads", a.heads), ("--batch", a.batch)):
            if given:
                products = ", ".join(x for x, grid in GRIDS.items() if isinstance(grid, Grid))
                raise BadInputError(f"{flag} is for --grid {products}, not {name}")
    dtypes = a.dtype or [None]
    narrow = [dtype for dtype in dtypes if dtype in QUANTISED_BYTES]
    takes_narrow = name in CACHE_GRIDS and CACHE_GRIDS[name].backend == "cuda"
    if narrow and (not takes_narrow or "cascade" in CACHE_GRIDS[name].ways):
        raise BadInputError(f"{narrow[0]} is for --grid decode, paged, mixed, not {name}")
    common = Asked(a.rows, a.dims, None, a.groups, a.page_sizes, a.heads, a.batch)
    asked = [common._replace(dtype=dtype) for dtype in dtypes]
    if name in SERVING_GRIDS:
        grid = SERVING_GRIDS[name]
        if a.page_sizes and grid.pages == (0,):
            raise BadInputError(f"--grid {name} has no pages; --grid paged has")
        for group in a.groups or ():
            if HEADS % group:
                raise BadInputError(f"{HEADS} query heads cannot share keys {group} to one")
        bench = (
            CacheBench(grid, a, output)
            if isinstance(grid, CacheGrid)
            else AppendBench(grid.backend, a, output)
        )
        return bench, [cell for x in asked for cell in grid.cells(x)]
    for flag, given in (("--groups", a.groups), ("--page-sizes", a.page_sizes)):
        if given:
            raise BadInputError(f"{flag} is for --grid {', '.join(SERVING_GRIDS)}, not {name}")
    if name in LATENT_GRIDS:
        if a.dims or a.precision or a.implementation:
            raise BadInputError("--grid latent has one head dim, 16 bits and one implementation")
        latent = LATENT_GRIDS[name]
        return LatentBench(latent.backend, a, output), [c for x in asked for c in latent.cells(x)]
    if name in EXPRESSION_GRIDS:
        variants = EXPRESSION_GRIDS[name]
        if a.precision:
            raise BadInputError("--precision is for float32; --grid expressions has 16 bits")
        cells = [cell for x in asked for cell in variants.cells(x)]
        return ExpressionBench(variants.backend, a, output), cells
    chosen = GRIDS[name]
    return Bench(chosen.backend, a, output), [cell for x in asked for cell in chosen.cells(x)]


def _tune(arguments: argparse.Namespace, output: Output) -> int:
    gpu = next(iter(fulmen.gpu_info()["devices"]), {"arch": "no GPU"})
    if gpu["arch"] != "sm_90a":
        raise BadInputError(f"--tune searches tiles of Hopper's kernels; here is {gpu['arch']}")
    from .tune import tune

    a = arguments
    return tune(a.tune, a.rows, a.dims, a.rounds, a.seconds, output)


class Bench(Benches):
    """The grids of whole sequences."""

    @property
    def defaults(self) -> tuple[str, ...]:
        return DEFAULT_PEERS[self.backend]

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        known = implementations(self.backend)
        asked = [x for x in arguments.implementation or ["auto"] if x in ("auto", *known)]
        precisions = arguments.precision or ["float32"]
        return [Fulmen(x, precision=p) for p in precisions for x in asked]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if self.torch is None:
            if name != "naive":
                raise MissingError("torch is not installed")
            return NaiveNumpy()
        if name not in PEERS:
            raise MissingError("it is timed over caches alone")
        if name == "fa3" and fa3_path:
            return peers_other.FlashAttention3Operators(fa3_path)
        side = PEERS[name]()
        if self.backend == "cpu" and name == "fa2":
            side.name = TORCH_CPU_NAME
        return side

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        tensors = random_tensors(cell, self.torch, self.device)
        return tensors, Truth(cell, tensors, np if self.torch is None else self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        if self.backend == "cuda" and cell.dtype == "float32":
            self.peak = self.peak or FmaPeak(self.torch)
            return {FMA_PEAK: self.peak.launch}
        if self.backend == "cuda" or cell.dtype == "float64":
            return {}
        self.loop = cpu_peaks.arithmetic(cell.dtype)
        found: dict[str, Callable[[], Any]] = {LOOP: self.loop.call}
        if self.torch is not None:
            self.peak = MatrixProduct(self.torch, cell.dtype)
            found[PRODUCT] = self.peak.call
        return found

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        told = ((FMA_PEAK, "fma_peak_tflops"), (PRODUCT, "product_tflops"))
        found = {
            key: self.peak.flops / times[name].median / 1e12 for name, key in told if name in times
        }
        if LOOP in times:
            found["peak_tflops"] = self.loop.amount / times[LOOP].median / 1e12
        return found

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        unit, scale = rate_of(records)
        has_peak = any("peak_tflops" in r for r in records)
        shares = ("% peak", "% gemm") if has_peak else ("peak MiB",)
        titles = ("who", "kernel", "p50 ms", "p99 ms", unit, *shares, "error")
        for name, found in groupby(records, cell_name):
            yield name, titles, [
                (r["who"], r["implementation"], *map(figure, (r["p50_ms"], r["p99_ms"])),
                 figure(r["tflops"] * scale),
                 *((_share(r, "peak_tflops"), _share(r, "product_tflops")) if has_peak
                   else (figure(r["peak_mib"]),)),
                 error_text(r["max_error"]))
                for r in found
            ]  # fmt: skip

    def plots(self, records: list[dict[str, Any]]) -> list[Plot]:
        return over_lengths(records)

    def columns(self, records: list[dict[str, Any]]) -> page.Columns:
        return page.columns(records)


def cell_name(r: dict[str, Any]) -> str:
    """What tables call the cell of a record."""
    heads = (
        str(r["heads_q"]) if r["heads_q"] == r["heads_kv"] else f"{r['heads_q']}/{r['heads_kv']}"
    )
    shape = f"{r['batch']}x{heads}x{r['seqlen_q']}x{r['d_qk']}"
    case = "" if r["case"] == "burst" else r["case"]
    words = (r["op"], r["dtype"], shape, figure(r["causal"]), r["option"], case)
    return " ".join(filter(None, words))


def _share(r: dict[str, Any], of: str) -> str:
    """Of a rate in the same run: that of products in registers, or of a matrix product."""
    return f"{100 * r['tflops'] / r[of]:.0f}" if r.get(of) else ""


def write(
    bench: Benches, folder: Path, name: str, records: list[dict[str, Any]], output: Output
) -> None:
    """Writes records as lines and as a page, and says so."""
    path, title = write_lines(folder, name, records), f"fulmen bench: {name}"
    output.line(page.write(path, records, title, bench.plots(records), bench.columns(records)))
