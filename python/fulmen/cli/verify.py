# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen verify: the named cases on every implementation, against float64."""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import fulmen
from fulmen.options import implementations

from . import gradient_errors, verify_record
from .arguments import positive
from .output import BAD, BadInputError, Output
from .workers import Death, Last, Waiting, run_all

DESCRIPTION = """\
Runs the named cases through every implementation of the backends that are here and judges each row
of each result by the error rule. CASE is a name, a pattern such as 'u35_*', or a tag such as bug;
none: every case. On a GPU the arrays of a case are copied there with their strides and gaps, as
arrays of PyTorch, CuPy or JAX; with --backend emulator the kernels run on the CPU, under a checker,
in the library that FULMEN_EMULATOR names (docs: contributing/emulator). A case that an
implementation refuses by name counts as skipped. The last line is 'N passed, N failed, N skipped';
the exit code is 1 if any failed. Cases over gigabytes of a GPU begin while there is memory for
them; what found none runs again, alone. With --gradient-errors drawn shapes are judged instead.
"""
PROCESS_BYTES = 3 << 29  # of a GPU's memory: a context, kernels, small arrays
STALLED_SECONDS = 300  # no case takes as long, compiling included
MOST_REASONS = 20  # why cases were skipped: the commonest
SAMPLE = 20  # one case in so many runs with each further kind of GPU arrays
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "emulator": "cuda"}  # whose implementations each has

Line = verify_record.Line


class Way(NamedTuple):
    """One way to run a case."""

    backend: str
    implementation: str
    arrays: str  # of fulmen.lab.cases.run_case
    every: int  # of the cases it runs one in so many

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.implementation if self.every == 1 else f"{self.implementation} ({self.arrays})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="name, pattern or tag")
    add(
        "--backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="auto: cpu, and cuda where there is a GPU",
    )
    every = (*implementations("cpu"), *implementations("cuda"))
    add("--implementation", choices=every, action="append",
        help="only this one; may be given several times")  # fmt: skip
    add("--arrays", choices=("torch", "cupy", "jax"), action="append",
        help="on a GPU: the first runs every case, each further one a sample; default: those that "
        "are installed")  # fmt: skip
    add("--jobs", type=int, default=0, metavar="N", help="processes; 0: as many as cores")
    add("--seconds", type=float, default=math.inf, metavar="T",
        help="end after T seconds; cases that were not run make the exit code 1")  # fmt: skip
    add("--record", metavar="FILE", help="write what was found to FILE, as JSON: commit, a hash of "
        "the kernels' text, card, driver, counts, failures")  # fmt: skip
    add("--again", metavar="FILE", help="run what failed in the record FILE, of these kernels, or "
        "had no time, and put what is found in its place there")  # fmt: skip
    add("--gradient-errors", type=positive, metavar="N", help="over N drawn shapes, as a table")
    add("--list", action="store_true", help="names and notes of the cases, and end")


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    from fulmen.lab.cases import find

    if arguments.jobs < 0:
        raise BadInputError(f"--jobs is {arguments.jobs}; at least 0 is allowed")
    try:
        cases = find(*arguments.cases)
    except LookupError as error:
        raise BadInputError(f"{error.args[0]}; fulmen verify --list shows them") from error
    if arguments.list:
        return _list(cases, output)
    ways = _ways(arguments)
    if arguments.gradient_errors:
        return gradient_errors.main(arguments, ways, output)
    start = time.monotonic()
    until = start + arguments.seconds
    lines: list[Line] = []
    tasks = _tasks(_order(cases, ways), ways, _unfinished(arguments))
    left = {(task.name, way.name) for task in tasks for way in task.ways}
    with output.progress("verifying", len(tasks)) as advance:
        for done, found in results(tasks, _jobs(arguments.jobs, ways), until, _free_bytes(ways)):
            lines += found
            left -= {line[:2] for line in found}
            advance(done)
    if left:
        not_run = len({name for name, _ in left})
        output.line(
            f"{not_run} of {len(tasks)} cases not run: the time was over, or a process died"
        )
    _report(lines, [way.name for way in ways], time.monotonic() - start, output)
    if arguments.again:
        verify_record.amend(arguments.again, lines)
    if arguments.record:
        verify_record.write(arguments.record, arguments.cases, lines, left)
    return int(bool(left) or any(line[2] == "failed" for line in lines))


def _unfinished(arguments: argparse.Namespace) -> set[tuple[str, str]] | None:
    """Cases and ways that failed or had no time in the record that --again names; None without.

    Raises:
        BadInputError: it cannot be read, or is of other kernels.
    """
    if not arguments.again:
        return None
    if arguments.record or arguments.cases:
        raise BadInputError("--again runs what its record names: leave out CASE and --record")
    try:
        return verify_record.unfinished(arguments.again)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--again: {error}") from error


def _order(cases: Sequence[Any], ways: list[Way]) -> Sequence[Any]:
    """For a GPU mixed: neighbours need the same kernels, and processes would wait for them.

    First come the cases whose arrays reach over gigabytes, which are copied whole and take longest.
    """
    if not any(way.backend == "cuda" for way in ways):
        return cases
    mixed = random.Random(0).sample(cases, len(cases))
    return sorted(mixed, key=lambda case: not _is_wide(case))


def _is_wide(case: Any) -> bool:
    return case.pool == "far" or any(how.startswith("far") for _, how in case.views)


def _ways(arguments: argparse.Namespace) -> list[Way]:
    """What every case is run with.

    Raises:
        BadInputError: an implementation of another backend, or arrays that are not installed.
    """
    asked = arguments.implementation
    backends = [arguments.backend]
    if arguments.backend == "auto":
        backends = ["cpu", "cuda"] if asked or fulmen.gpu_info()["devices"] else ["cpu"]
    ways: list[Way] = []
    for backend in backends:
        chosen = [x for x in implementations(BACKENDS[backend]) if not asked or x in asked]
        kinds = _arrays(backend, arguments.arrays) if chosen else ["numpy"]
        for index, arrays in enumerate(kinds):
            ways += [Way(backend, x, arrays, SAMPLE if index else 1) for x in chosen]
    missing = sorted(set(asked or ()) - {way.implementation for way in ways})
    if missing:
        allowed = ", ".join(x for name in backends for x in implementations(BACKENDS[name]))
        raise BadInputError(
            f"--implementation is {missing[0]} and --backend {arguments.backend}; allowed there "
            f"are {allowed}"
        )
    return ways


def _arrays(backend: str, asked: list[str] | None) -> list[str]:
    if backend == "cuda":
        return _gpu_arrays(asked)
    if backend == "cpu":
        return ["numpy"]
    from fulmen.lab.cases import emulator

    try:
        emulator.start()
    except emulator.NoEmulatorError as error:
        raise BadInputError(str(error)) from error
    return ["emulated"]


def _gpu_arrays(asked: list[str] | None) -> list[str]:
    from fulmen.lab.cases.gpu_arrays import available

    gpus = fulmen.gpu_info()
    if not gpus["devices"]:
        raise BadInputError(f"no GPU to verify on: {gpus['driver_reason'] or 'no device'}")
    installed = available()
    for name in asked or ():
        if name not in installed:
            raise BadInputError(f"--arrays is {name}, which is not installed; pip install {name}")
    kinds = asked or installed
    if not kinds:
        raise BadInputError(
            "--backend cuda needs arrays in the memory of a GPU: pip install torch, cupy or jax"
        )
    return kinds


def _jobs(asked: int, ways: list[Way]) -> int:
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    # With a GPU processes also wait, for it and for kernels that others compile.
    return min(3 * cores // 2, 24) if any(way.backend == "cuda" for way in ways) else min(cores, 16)


class Task(NamedTuple):
    """A case, and what it is run with."""

    name: str
    ways: list[Way]
    bytes: int = 0  # of a GPU's memory that its arrays take, if more than a process has anyway


def _tasks(cases: Sequence[Any], ways: list[Way], only: set[tuple[str, str]] | None) -> list[Task]:
    from fulmen.lab.cases import gpu_bytes

    tasks = []
    for index, case in enumerate(cases):
        if only is None:
            chosen = [way for way in ways if index % way.every == 0]
        else:
            chosen = [way for way in ways if (case.name, way.name) in only]
        on_gpu = any(way.backend == "cuda" for way in chosen)
        if chosen:
            tasks.append(
                Task(case.name, chosen, gpu_bytes(case) if on_gpu and _is_wide(case) else 0)
            )
    return tasks


def _free_bytes(ways: list[Way]) -> float:
    """What processes may take together of the memory of the GPU that the cases run on."""
    from fulmen.lab.cases.gpu_arrays import owner

    kinds = {way.arrays for way in ways if way.backend == "cuda"} - {"jax"}
    return min((owner(kind).free_bytes() for kind in kinds), default=math.inf)


def results(
    tasks: list[Task], jobs: int, until: float, free_bytes: float = math.inf
) -> Iterator[tuple[int, list[Line]]]:
    """Numbers of cases that are done and their lines, as they come until a time.

    A case whose process dies, or loses its GPU, is run again, each way in a process of its own, so
    that the way that does it is the one that fails. What found no memory is run again when all
    other processes have ended, one after the other.
    """
    if jobs <= 1:
        for task in tasks:
            if time.monotonic() > until:
                break
            result = run_task(task)
            yield 1, result.result if isinstance(result, Last) else result
        return
    crowded: list[Task] = []
    room = free_bytes - jobs * PROCESS_BYTES
    for done, ended, lines in _side_by_side(tasks, jobs, until, room):
        kept = [line for line in lines if not _found_no_memory(line)]
        if len(kept) < len(lines):
            again = {line[1] for line in lines if line not in kept}
            crowded.append(ended._replace(ways=[way for way in ended.ways if way.name in again]))
        yield done * (len(kept) == len(lines)), kept
    for _, _, lines in _side_by_side(crowded, 1, until, 0):
        yield 1, lines


def _found_no_memory(line: Line) -> bool:
    return line[2] == "failed" and line[4].startswith("OutOfMemoryError")


def _side_by_side(
    tasks: list[Task], jobs: int, until: float, room: float
) -> Iterator[tuple[int, Task, list[Line]]]:
    """Whether a case is done, the task that ended and its lines."""
    waiting = Waiting(tasks, room)
    pending = Counter(task.name for task in tasks)
    found = run_all(
        run_task,
        waiting.take,
        jobs,
        start=partial(_start, max(1, min(jobs, len(tasks))), _gpus(tasks)),
        stalled_seconds=STALLED_SECONDS,
        until=until,
    )
    for task, result in found:
        waiting.end(task)
        if isinstance(result, (Death, Last)) and len(task.ways) > 1:
            waiting.put_first(task._replace(ways=[way]) for way in task.ways)
            pending[task.name] += len(task.ways) - 1
            continue
        lines = result.result if isinstance(result, Last) else result
        if isinstance(result, Death):
            lines = [(task.name, task.ways[0].name, "failed", math.inf, result.reason)]
        pending[task.name] -= 1
        yield int(pending[task.name] == 0), task, lines


def _gpus(tasks: list[Task]) -> list[str]:
    """The GPUs that processes share, as CUDA_VISIBLE_DEVICES names them."""
    if not any(way.backend == "cuda" for task in tasks for way in task.ways):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(device) for device in range(len(fulmen.gpu_info()["devices"]))]


def _start(jobs: int, gpus: list[str], before: int) -> None:
    if len(gpus) > 1:  # dealt out; each process has one
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[before % len(gpus)]
    cores = os.cpu_count() or 1
    os.environ.setdefault("FULMEN_NUM_THREADS", str(max(cores // jobs, 2)))
    # One process of many: PyTorch and JAX take memory as they need it, not all of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def run_task(task: Task) -> list[Line] | Last:
    """Runs a case by name: what a process does. Last: with a fault that its GPU does not forget."""
    from fulmen.lab.cases import find, run_case
    from fulmen.lab.cases.gpu_arrays import is_lost, release

    lines = []
    for case in find(task.name):
        for way in task.ways:
            backend = "cpu" if way.backend == "cpu" else "cuda"
            outcome = run_case(case, backend, way.implementation, way.arrays)
            lines.append(
                (case.name, way.name, outcome.status, float(outcome.ratio), outcome.message)
            )
            if outcome.status == "failed" and is_lost(way.arrays):
                return Last(lines)
            if task.bytes:
                release(way.arrays)
    return lines


def _list(cases: Any, output: Output) -> int:
    if output.as_json:
        output.json([{"name": c.name, "tags": list(c.tags), "note": c.note} for c in cases])
    else:
        output.table(("case", "tags", "note"), [(c.name, " ".join(c.tags), c.note) for c in cases])
    return 0


def _report(lines: list[Line], ways: list[str], seconds: float, output: Output) -> None:
    counts = Counter(line[2] for line in lines)
    worst = []
    for how in ways:
        mine = [line for line in lines if line[1] == how]
        each = Counter(line[2] for line in mine)
        ratio, name = max(((x[3], x[0]) for x in mine if x[2] == "passed"), default=(0.0, ""))
        worst.append((how, *(str(each[s]) for s in ("passed", "failed", "skipped")),
                      f"{ratio:.2f}", name))  # fmt: skip
    columns = ("implementation", "passed", "failed", "skipped", "largest of allowed", "in case")
    output.table(columns, worst)
    _report_skips([line for line in lines if line[2] == "skipped"], output)
    bad = sorted(line for line in lines if line[2] == "failed")
    if bad:
        output.line()
        output.table(
            ("case", "implementation", "of allowed", "what"),
            [(name, how, f"{ratio:.3g}", said) for name, how, _, ratio, said in bad],
            lambda _: BAD,
        )
        output.line()
    output.line(f"{len(lines)} runs in {seconds:.1f} s")
    output.line(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    if output.as_json:
        output.json({
            **{status: counts[status] for status in ("passed", "failed", "skipped")},
            "seconds": seconds,
            "runs": [
                dict(zip(("case", "implementation", "status", "of_allowed", "message"), line))
                for line in sorted(lines)
            ],
        })  # fmt: skip


def _report_skips(skipped: list[Line], output: Output) -> None:
    """One line for each reason: how many runs, of whom, and why. Reasons that differ in a number
    alone are one, of which the commonest text is shown.
    """
    groups: dict[str, list[Line]] = {}
    for line in skipped:
        groups.setdefault(re.sub(r"\d+", "0", line[4]), []).append(line)
    if groups:
        output.line()
    by_size = sorted(groups.values(), key=len, reverse=True)
    for group in by_size[:MOST_REASONS]:
        who = ", ".join(dict.fromkeys(line[1] for line in group))
        reason = Counter(line[4] for line in group).most_common(1)[0][0]
        output.line(f"{len(group)} skipped ({who}): {reason}")
    if len(by_size) > MOST_REASONS:
        rest = sum(len(group) for group in by_size[MOST_REASONS:])
        output.line(f"{rest} skipped for {len(by_size) - MOST_REASONS} other reasons")
