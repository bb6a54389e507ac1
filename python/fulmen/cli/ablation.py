# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen ablation: the ladder of GPU kernels, and every optimisation off, one at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import fulmen
from fulmen.array_types import named_dtype
from fulmen.inspection import optimisations
from fulmen.lab.benchmark import page
from fulmen.lab.benchmark.cells import ITEM_BYTES, Cell
from fulmen.lab.benchmark.plots import of_optimisations
from fulmen.lab.benchmark.records import Record, Run, figure, write_lines
from fulmen.lab.benchmark.reference import Truth
from fulmen.lab.benchmark.sides import Answer, Fulmen, random_tensors
from fulmen.lab.benchmark.timing import GpuTimer
from fulmen.layouts import phantom
from fulmen.options import implementations

from .arguments import positive, shape_of, why_no_gpu
from .output import ACCEPTABLE, BadInputError, Output

DESCRIPTION = """\
The forward kernels from the plainest to the fastest, and each of them without one of its
optimisations: what the compiler made of it (registers, shared memory, instructions in the machine
code by class) and, on a GPU, its time and error. All answer the same arrays, in random order in one
run. Without a GPU, or with --device NAME, the static part alone.
"""
CLASSES = ("tensor", "arithmetic", "special", "conversion", "shared", "global", "local")
MEASURED = (
    ("of whole", "ratio"), ("p50 ms", "p50_ms"), ("TFLOP/s", "tflops"), ("error", "max_error"),
)  # fmt: skip
RESOURCES = (
    ("registers", "registers"), ("spilled B", "spill_bytes"), ("shared B", "shared_bytes"),
    ("blocks/SM", "blocks_per_multiprocessor"),
)  # fmt: skip
INSTRUCTIONS = tuple((name, name) for name in CLASSES)
NAMES = (("kernel", "implementation"), ("without", "without"))
COLUMNS = (*NAMES, *MEASURED, *RESOURCES, *INSTRUCTIONS)


class Rung(NamedTuple):
    """A kernel, and what it is made without."""

    implementation: str
    without: tuple[str, ...]
    explanation: fulmen.Explanation

    def static(self) -> Record:
        """What is known without running it."""
        kernel = self.explanation["kernels"][0]
        keys = ("registers", "spill_bytes", "shared_bytes", "blocks_per_multiprocessor")
        counts = kernel["instructions"] or {}
        return {
            "without": ", ".join(self.without),
            **{key: kernel[key] for key in keys},
            **{name: counts.get(name) for name in CLASSES},
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("shape", metavar="SHAPE", nargs="?", default="4x16x4096x128",
        help="of q, k and v: BATCHxHEADSxROWSxDIM; 4x16x4096x128")  # fmt: skip
    add("--causal", action="store_true")
    add("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16")
    ladder = implementations("cuda")  # each builds on the ideas of the one before
    add("--implementation", action="append", choices=ladder, metavar="NAME",
        help=f"only these rungs, of {', '.join(ladder)}")  # fmt: skip
    add("--device", metavar="NAME", help="of a GPU that need not be here, such as h100; its "
        "kernels are compiled and not run")  # fmt: skip
    add("--rounds", type=positive, default=5, metavar="N", help="rounds of each rung; 5")
    add("-o", "--output", type=Path, metavar="FOLDER",
        help="write DATE-ablation-CARD.jsonl, .html and plots there")  # fmt: skip


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    batch, heads, rows, dim = shape_of(arguments.shape)
    grid = "ablation-causal" if arguments.causal else "ablation"
    cell = Cell(grid, "forward", arguments.dtype, batch, heads, heads, rows, dim, arguments.causal)
    here = arguments.device is None and bool(fulmen.gpu_info()["devices"])
    unmeasured = _why_unmeasured(arguments.device)
    if arguments.output is not None and unmeasured:
        raise BadInputError(f"--output writes what a GPU measured; {unmeasured}")
    names = arguments.implementation or implementations("cuda")
    target: dict[str, Any] = {"device": 0} if here else {"device_name": arguments.device or "h100"}
    ways = list(product(names, ((), *((one,) for one in optimisations()))))
    with output.progress("compiling", len(ways)) as advance:
        found = _rungs(cell, ways, target, lambda: advance(1))
    if not found:
        raise BadInputError(f"none of {', '.join(names)} takes {cell.name} on this GPU")
    records = _described(found) if unmeasured else _measured(cell, found, arguments, output)
    if output.as_json:
        output.json(records)
    device = found[0].explanation["device"]
    output.line(f"{cell.name} on {device['name']} ({device['arch']})")
    _report(records, unmeasured, output)
    if arguments.output is not None:
        _write(arguments.output, cell, records, output)
    return 0


def _why_unmeasured(named: str | None) -> str:
    """What keeps the kernels from being timed here; "" where nothing does."""
    if named is not None:
        return f"the kernels of {named} are compiled and not run"
    reason = why_no_gpu(fulmen.gpu_info())
    if not reason and find_spec("torch") is None:
        return "a GPU is timed with torch: pip install torch"
    return reason


def _report(records: list[Record], unmeasured: str, output: Output) -> None:
    """A table each of times, of resources and of instructions, or a line that says why not."""
    uncompiled = "the kernels were not compiled: fulmen doctor says whether NVRTC is there"
    for columns, why in (
        (MEASURED, unmeasured),
        (RESOURCES, uncompiled),
        (INSTRUCTIONS, uncompiled),
    ):
        if all(r.get(key) is None for r in records for _, key in columns):
            output.line(f"left out: {', '.join(title for title, _ in columns)}; {why}")
        else:
            shown = (*NAMES, *columns)
            lines = [tuple(figure(r.get(key)) for _, key in shown) for r in records]
            titles = [title for title, _ in shown]
            output.table(titles, lines, lambda line: "" if line[1] else ACCEPTABLE)
        output.line()


def _write(folder: Path, cell: Cell, records: list[Record], output: Output) -> None:
    path = write_lines(folder, cell.grid, records)
    plots = of_optimisations(records)
    output.line(page.write(path, records, f"fulmen ablation: {cell.name}", plots, COLUMNS))


def _rungs(
    cell: Cell,
    ways: list[tuple[str, tuple[str, ...]]],
    target: dict[str, Any],
    done: Callable[[], None],
) -> list[Rung]:
    """Every kernel that takes the cell, whole and less what it can be made without."""
    shape = (cell.batch, cell.heads, cell.rows, cell.dim)
    x = phantom(shape, named_dtype(cell.dtype))

    def rung(way: tuple[str, tuple[str, ...]]) -> Rung | None:
        name, without = way
        try:
            said = fulmen.explain(
                x, x, x, implementation=name, causal=cell.causal, without=without, **target
            )
        except fulmen.UnsupportedError:  # no such optimisation, or not this cell
            return None
        finally:
            done()
        return Rung(name, without, said)

    with ThreadPoolExecutor() as compilers:
        return [each for each in compilers.map(rung, ways) if each]


def _described(found: list[Rung]) -> list[Record]:
    return [{"implementation": rung.implementation, **rung.static()} for rung in found]


def _measured(
    cell: Cell, found: list[Rung], arguments: argparse.Namespace, output: Output
) -> list[Record]:
    """Times and errors of all, in random order."""
    torch: Any = import_module("torch")
    run, timer = Run("cuda"), GpuTimer(arguments.rounds)
    tensors = random_tensors(cell, torch, "cuda")
    truth = Truth(cell, tensors, torch)
    answers: list[tuple[Answer, float]] = []
    with output.progress("running", len(found)) as advance:
        for rung in found:
            advance(0, " without ".join(filter(None, (rung.implementation, *rung.without))))
            answer = Fulmen(rung.implementation, rung.without).answer(cell, tensors)
            answers.append((answer, truth.error(answer.results(answer.call()))))
            advance(1)
        timer.tell = lambda now: advance(0, f"timing kernel {now} of {len(found)}")
        times = timer.burst({str(i): answer.call for i, (answer, _) in enumerate(answers)})
    records: list[Record] = []
    whole: dict[str, float] = {}
    for i, (rung, (_, error)) in enumerate(zip(found, answers)):
        record = run.record(cell, "fulmen", rung.implementation, times[str(i)], "burst")
        if not rung.without:
            whole[rung.implementation] = record["tflops"]
        ratio = record["tflops"] / whole.get(rung.implementation, record["tflops"])
        records.append({**record, "max_error": error, "ratio": ratio, **rung.static()})
    return records
