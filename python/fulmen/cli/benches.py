# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How `fulmen bench` runs a cell of any grid: each side once, its error, then all in turn."""

from __future__ import annotations

import argparse
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import fulmen
from fulmen.lab.benchmark import machine
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.records import Run, is_ours
from fulmen.lab.benchmark.sides import Answer, Side
from fulmen.lab.benchmark.timing import GRAPH_CALLS, CpuTimer, GpuTimer, Times

from .output import BadInputError, Output

SHOWN_LAUNCH = 2e-3  # seconds of a call; a longer one hides its launch


class Benches(ABC):
    """The sides of a run, and what they are timed with; those of a grid follow below."""

    graph_calls = GRAPH_CALLS

    def __init__(self, backend: str, arguments: argparse.Namespace, output: Output) -> None:
        """Loads the peers; those that do not load are listed with the reason.

        Raises:
            BadInputError: no GPU, or no torch to time it with.
        """
        self.backend = backend
        self.device = "cpu" if backend == "cpu" else "cuda"
        self.output = output
        self.say: Callable[[str], None] = lambda now: None  # told what runs
        self.sustained = arguments.sustained and backend == "cuda"
        self.missing: dict[str, str] = {}
        self.peak: Any = None
        self.torch = self._import_torch()
        self.timer: Any = (
            CpuTimer(arguments.rounds) if backend == "cpu" else GpuTimer(arguments.rounds)
        )
        self.sides: list[Side] = self.ours(arguments)
        for name in self.defaults if arguments.peers is None else arguments.peers:
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

    @property
    @abstractmethod
    def defaults(self) -> tuple[str, ...]:
        """The peers of a run that names none."""

    @abstractmethod
    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        """The sides of fulmen that are asked for."""

    @abstractmethod
    def peer(self, name: str, fa3_path: str | None) -> Side:
        """Another side by name; FlashAttention-3 from the path of its operators, if there is one.

        Raises:
            MissingError: it does not load here.
        """

    @abstractmethod
    def inputs(self, cell: Any) -> tuple[Any, Any]:
        """The arrays of a cell, and what its errors are measured against."""

    @abstractmethod
    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        """Calls that are timed among the sides of a cell: what the card does at most."""

    @abstractmethod
    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        """Members of the record of a side that say where the ceilings are."""

    @abstractmethod
    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        """The name of each cell, titles of columns and rows, in 80 columns; files and --json have
        every figure.
        """

    @abstractmethod
    def plots(self, records: list[dict[str, Any]]) -> list[Any]:
        """The plots of the page."""

    @abstractmethod
    def columns(self, records: list[dict[str, Any]]) -> Sequence[tuple[str, str]]:
        """Of the table of the page."""

    def _add(self, name: str, fa3_path: str | None) -> None:
        try:
            self.sides.append(self.peer(name, fa3_path))
        except MissingError as reason:
            self.missing[name] = f"{name} is left out: {reason}"

    def compile(self, cells: Sequence[Cell]) -> None:
        """Compiles the GPU kernels of cells, many at once; what fails says so in its own cell."""
        if self.backend == "cpu":
            return
        problems = list(self._problems(cells))
        shown = self.output.progress("compiling kernels", len(problems))
        with shown as advance, suppress(fulmen.Error):
            fulmen.warmup(problems, progress=lambda done, total: advance(1))

    def _problems(self, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
        """What is compiled for cells."""
        asked: list[Any] = [side for side in self.sides if is_ours(side.name)]
        for cell, side in product(cells, asked):
            with suppress(MissingError):
                yield side.problem(cell)

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """The records of a cell: a row a side."""
        self.timer.tell = lambda now: self.say(f"{cell.name}: {now}")
        tensors, truth = self.inputs(cell)
        answers: dict[str, tuple[Side, Answer, int | None, float]] = {}
        with self._gradients(cell):
            for side in self.sides:
                self._try(cell, tensors, truth, side, answers)
            calls = {key: answer.call for key, (_, answer, _, _) in answers.items()}
            calls.update(self.ceilings(cell))
            factor = self.graph_calls if cell.graph else 1
            if cell.graph:
                calls = {key: self.timer.graphed(call, factor) for key, call in calls.items()}
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
                record.update(self.beside_ceilings(cell, times[key], times))
                if cell.graph and times[key].median < factor * SHOWN_LAUNCH:
                    one = times[key].median / factor
                    record["host_us"] = self.timer.host_seconds(answer.call, one) * 1e6
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
        tensors: Any,
        truth: Any,
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
        asked = f" {getattr(side, 'asked', '')}" if is_ours(side.name) else ""
        key = f"{side.name}{asked} {reason}"
        self.missing.setdefault(key, f"{side.name}{asked} is left out of {cell.name}: {reason}")


class ServingBench(Benches):
    """Benches of a server's calls, which do little else than move bytes."""

    graph_calls = 1  # a second one would find its bytes in the L2
    figures: Sequence[tuple[str, str]]  # columns of the page that are of such benches alone

    def columns(self, records: list[dict[str, Any]]) -> Sequence[tuple[str, str]]:
        return (
            ("dtype", "dtype"), ("cell", "shape"), ("who", "who"),
            ("implementation", "implementation"), ("p50 ms", "p50_ms"), ("p99 ms", "p99_ms"),
            *self.figures, ("host us", "host_us"), ("error", "max_error"),
        )  # fmt: skip


def error_text(error: float | None) -> str:
    """An error as tables show it."""
    return "" if error is None else f"{error:.1e}"
