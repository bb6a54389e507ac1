# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen bench: speed, memory and error over a grid of shapes, beside other libraries."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import fulmen
from fulmen.lab.benchmark import machine, page, peers_other, peers_torch
from fulmen.lab.benchmark.cells import GRIDS, ITEM_BYTES, Cell
from fulmen.lab.benchmark.fma_peak import FmaPeak, MatrixProduct
from fulmen.lab.benchmark.plots import over_lengths
from fulmen.lab.benchmark.records import Run, figure, is_ours, rate_of, write_lines
from fulmen.lab.benchmark.reference import Truth
from fulmen.lab.benchmark.sides import (
    Answer,
    Fulmen,
    MissingError,
    NaiveNumpy,
    Side,
    Tensors,
    random_tensors,
)
from fulmen.lab.benchmark.timing import GRAPH_CALLS, CpuTimer, GpuTimer
from fulmen.options import implementations, names_of

from .arguments import positive
from .output import ACCEPTABLE, BadInputError, Output

DESCRIPTION = """\
Times fulmen and other libraries on the same arrays, in one run, in random order with idle gaps and
a flushed cache: only ratios within a cell count. With --output one JSON object a line, and a page
with plots, which are also there as SVG and PNG: they need matplotlib, pip install 'fulmen[bench]'.
A library that is not installed is one line; it stops nothing.
"""
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
    "naive": peers_torch.NaiveTorch,
}
DEFAULT_PEERS = {
    "cuda": ("cudnn", "fa2", "fa3", "fa4", "efficient", "flashinfer", "xformers", "naive"),
    "cpu": ("fa2", "math", "naive"),
}
FMA_PEAK = "multiply-adds alone"  # a call beside the sides of a float32 cell
PRODUCT = "a matrix product alone"  # likewise, of a cell on the CPU, by torch
TORCH_CPU_NAME = "torch"  # SDPA on the CPU has one kernel, which torch calls flash attention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("--grid", choices=tuple(GRIDS), action="append",
        help="forward, options, backward, training, float32, small (GPU), cpu; default: forward "
        "where a GPU is, else cpu")  # fmt: skip
    add("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="of the default grid")
    add("--rows", type=positive, nargs="+", metavar="S", help="these sequence lengths")
    add("--dims", type=positive, nargs="+", metavar="D", help="these head dims")
    add("--dtype", choices=tuple(ITEM_BYTES), help="instead of the grid's")
    add("--implementation", action="extend", nargs="+", choices=names_of("implementation"),
        metavar="NAME", help="of fulmen; several are several rows; auto")  # fmt: skip
    add("--precision", action="extend", nargs="+", choices=names_of("precision"), metavar="NAME",
        help="of float32 products: float32, tf32, 3xtf32; several are several rows")  # fmt: skip
    add("--peers", nargs="*", choices=tuple(PEERS), metavar="NAME",
        help=f"others beside fulmen, of {', '.join(PEERS)}; without names: none")  # fmt: skip
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
        bench = Bench(GRIDS[name].backend, arguments, output)
        cells = list(GRIDS[name].cells(arguments.rows, arguments.dims, arguments.dtype))
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
        _tables(found, output)
        for line in bench.missing.values():
            output.line(line)
        if arguments.output is not None and found:
            named = (*(arguments.implementation or ()), *(arguments.precision or ()))
            _write(arguments.output, "-".join((name, *named)), found, output)
        records += found
    if output.as_json:
        output.json(records)
    return int(not any(is_ours(r["who"]) for r in records))


def _default_grid(backend: str) -> str:
    if backend == "auto":
        backend = "cuda" if fulmen.gpu_info()["devices"] else "cpu"
    return "cpu" if backend == "cpu" else "forward"


def _tune(arguments: argparse.Namespace, output: Output) -> int:
    gpu = next(iter(fulmen.gpu_info()["devices"]), {"arch": "no GPU"})
    if gpu["arch"] != "sm_90a":
        raise BadInputError(f"--tune searches tiles of Hopper's kernels; here is {gpu['arch']}")
    from .tune import tune

    a = arguments
    return tune(a.tune, a.rows, a.dims, a.rounds, a.seconds, output)


class Bench:
    """The sides of a run, and what they are timed with."""

    def __init__(self, backend: str, arguments: argparse.Namespace, output: Output) -> None:
        """Loads the peers; those that do not load are listed with the reason.

        Raises:
            BadInputError: no GPU, or no torch to time it with.
        """
        self.backend = backend
        self.output = output
        self.say: Callable[[str], None] = lambda now: None  # told what runs
        self.sustained = arguments.sustained and backend == "cuda"
        self.missing: dict[str, str] = {}
        self.peak: Any = None
        self.torch = self._import_torch()
        self.timer: Any = (
            CpuTimer(arguments.rounds) if backend == "cpu" else GpuTimer(arguments.rounds)
        )
        known = implementations(backend)
        asked = [x for x in arguments.implementation or ["auto"] if x in ("auto", *known)]
        precisions = arguments.precision or ["float32"]
        self.sides: list[Side] = [Fulmen(x, precision=p) for p in precisions for x in asked]
        peers = DEFAULT_PEERS[backend] if arguments.peers is None else arguments.peers
        for name in peers:
            self._add(name, arguments.fa3_operators)
        self.common = Run(backend)

    def _import_torch(self) -> Any:
        try:
            import torch
        except ImportError:
            if self.backend == "cuda":
                raise BadInputError("a GPU is timed with torch; pip install torch") from None
            return None
        if self.backend == "cuda" and not torch.cuda.is_available():
            raise BadInputError(f"torch {torch.__version__} sees no GPU; --grid cpu needs none")
        return torch

    def _add(self, name: str, fa3_path: str | None) -> None:
        try:
            if self.torch is None:
                if name != "naive":
                    raise MissingError("torch is not installed")
                self.sides.append(NaiveNumpy())
            elif name == "fa3" and fa3_path:
                self.sides.append(peers_other.FlashAttention3Operators(fa3_path))
            else:
                side = PEERS[name]()
                if self.backend == "cpu" and name == "fa2":
                    side.name = TORCH_CPU_NAME
                self.sides.append(side)
        except MissingError as reason:
            self.missing[name] = f"{name} is left out: {reason}"

    def compile(self, cells: list[Cell]) -> None:
        """Compiles the GPU kernels of cells, many at once; what fails says so in its own cell."""
        if self.backend == "cpu":
            return
        asked = [side for side in self.sides if isinstance(side, Fulmen)]
        problems = [side.problem(cell) for cell in cells for side in asked]
        shown = self.output.progress("compiling kernels", len(problems))
        with shown as advance, suppress(fulmen.Error):
            fulmen.warmup(problems, progress=lambda done, total: advance(1))

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """The records of a cell: a row a side."""
        self.timer.tell = lambda now: self.say(f"{cell.name}: {now}")
        device = "cpu" if self.backend == "cpu" else "cuda"
        tensors = random_tensors(cell, self.torch, device)
        truth = Truth(cell, tensors, np if self.torch is None else self.torch)
        answers: dict[str, tuple[Side, Answer, int | None, float]] = {}
        with self._gradients(cell):
            for side in self.sides:
                self._try(cell, tensors, truth, side, answers)
            calls = {key: answer.call for key, (_, answer, _, _) in answers.items()}
            factor = 1
            if self.backend == "cuda" and cell.dtype == "float32":
                self.peak = self.peak or FmaPeak(self.torch)
                calls[FMA_PEAK] = self.peak.launch
            product = None
            if self.backend == "cpu" and self.torch is not None and cell.dtype != "float64":
                product = MatrixProduct(self.torch, cell.dtype)
                calls[PRODUCT] = product.call
            if cell.graph:
                calls = {key: self.timer.graphed(call) for key, call in calls.items()}
                factor = GRAPH_CALLS
            found = []
            times = self.timer.burst(calls)
            clock = machine.clock_mhz() if self.backend == "cuda" else None
            for key, (side, answer, peak, error) in answers.items():
                case = "graph" if cell.graph else "burst"
                who = (cell, side.name, answer.implementation)
                record = self.common.record(*who, times[key], case, factor)
                record.update(
                    peak_mib=None if peak is None else peak / 2**20,
                    max_error=error,
                    clock_mhz=clock,
                )
                if FMA_PEAK in times:
                    rate = self.peak.flops / times[FMA_PEAK].median
                    record["fma_peak_tflops"] = rate / 1e12
                if product is not None:
                    record["product_tflops"] = product.flops / times[PRODUCT].median / 1e12
                if cell.graph:
                    record["host_us"] = self.timer.host_seconds(answer.call) * 1e6
                found.append(record)
                if self.sustained:
                    hot = self.timer.sustained(calls[key], times[key].median)
                    again = self.common.record(*who, hot, "sustained", factor)
                    again.update(clock_mhz=machine.clock_mhz())
                    found.append(again)
        del answers, calls, tensors, truth
        gc.collect()
        return found

    def _gradients(self, cell: Cell) -> Any:
        from contextlib import nullcontext

        if self.torch is None:
            return nullcontext()
        return self.torch.set_grad_enabled(cell.op == "backward")

    def _try(
        self,
        cell: Cell,
        tensors: Tensors,
        truth: Truth,
        side: Side,
        answers: dict[str, tuple[Side, Answer, int | None, float]],
    ) -> None:
        try:
            if cell.option not in side.options:
                raise MissingError(f"it is not asked for {cell.option} cells")
            self.timer.tell(f"{side.name}, one call and its error")
            answer = side.answer(cell, tensors)
            answer.call()  # compiled and warm
            result, peak = self.timer.peak(answer.call)
            error = truth.error(answer.results(result))
        except MissingError as reason:
            self._leave_out(side, cell, str(reason))
        except Exception as failure:  # a peer that fails stops nothing
            text = (str(failure).strip().splitlines() or [""])[0]
            self._leave_out(side, cell, f"{type(failure).__name__}: {text}")
        else:
            key = f"{side.name} {len(answers)}"
            total = None if peak is None else peak + answer.extra_bytes
            answers[key] = (side, answer, total, error)

    def _leave_out(self, side: Side, cell: Cell, reason: str) -> None:
        asked = f" {side.asked}" if isinstance(side, Fulmen) else ""
        key = f"{side.name}{asked} {reason}"
        self.missing.setdefault(key, f"{side.name}{asked} is left out of {cell.name}: {reason}")


def _tables(records: list[dict[str, Any]], output: Output) -> None:
    """One table a cell, in 80 columns; files and --json have every figure."""
    unit, scale = rate_of(records)
    has_product = any("product_tflops" in r for r in records)
    share = "% product" if has_product else "peak MiB"
    titles = ("who", "kernel", "p50 ms", "p99 ms", unit, share, "error")
    for name, found in groupby(records, _cell_name):
        rows = [
            (r["who"], r["implementation"], *map(figure, (r["p50_ms"], r["p99_ms"])),
             figure(r["tflops"] * scale), _share(r) if has_product else figure(r["peak_mib"]),
             _error(r["max_error"]))
            for r in found
        ]  # fmt: skip
        output.line(name)
        output.table(titles, rows, lambda row: ACCEPTABLE if is_ours(row[0]) else "")
        output.line()


def _cell_name(r: dict[str, Any]) -> str:
    heads = (
        str(r["heads_q"]) if r["heads_q"] == r["heads_kv"] else f"{r['heads_q']}/{r['heads_kv']}"
    )
    shape = f"{r['batch']}x{heads}x{r['seqlen_q']}x{r['d_qk']}"
    case = "" if r["case"] == "burst" else r["case"]
    words = (r["op"], r["dtype"], shape, figure(r["causal"]), r["option"], case)
    return " ".join(filter(None, words))


def _share(r: dict[str, Any]) -> str:
    """Of the rate of a matrix product in the same run."""
    product = r.get("product_tflops")
    return f"{100 * r['tflops'] / product:.0f}" if product else ""


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _write(folder: Path, name: str, records: list[dict[str, Any]], output: Output) -> None:
    path = write_lines(folder, name, records)
    plots = over_lengths(records)
    output.line(page.write(path, records, f"fulmen bench: {name}", plots, page.columns(records)))
