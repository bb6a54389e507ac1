# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen verify: the named cases on every implementation, against float64."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .output import BAD, BadInputError, Output

DESCRIPTION = """\
Runs the named cases through every implementation and judges each row of each result by the error
rule. CASE is a name, a pattern such as 'u35_*', or a tag such as bug; none: every case. The last
line is 'N passed, N failed, N skipped'; the exit code is 1 if any failed.
"""
IMPLEMENTATIONS = ("scalar", "tiled")
CHUNK = 8  # cases that a process takes at once

Line = tuple[str, str, str, float, str]  # case, implementation, status, ratio, message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="name, pattern or tag")
    add("--backend", default="cpu", help="cpu")
    add("--implementation", choices=IMPLEMENTATIONS, action="append", help="only this one")
    add("--jobs", type=int, default=0, metavar="N", help="processes; 0: as many as cores")
    add("--list", action="store_true", help="names and notes of the cases, and end")


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    from fulmen.cases import find

    if arguments.backend not in ("cpu", "auto"):
        raise BadInputError(f"--backend is {arguments.backend}; this version has cpu")
    if arguments.jobs < 0:
        raise BadInputError(f"--jobs is {arguments.jobs}; at least 0 is allowed")
    try:
        cases = find(*arguments.cases)
    except LookupError as error:
        raise BadInputError(f"{error.args[0]}; fulmen verify --list shows them") from error
    if arguments.list:
        return _list(cases, output)
    implementations = tuple(arguments.implementation or IMPLEMENTATIONS)
    start = time.perf_counter()
    lines: list[Line] = []
    names = [case.name for case in cases]
    with output.progress("verifying", len(names)) as advance:
        for found in results(names, arguments.backend, implementations, _jobs(arguments.jobs)):
            lines += found
            advance(len(found) // len(implementations))
    _report(lines, implementations, time.perf_counter() - start, output)
    return int(any(line[2] == "failed" for line in lines))


def _jobs(asked: int) -> int:
    return asked or min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 16)


def results(
    names: list[str], backend: str, implementations: tuple[str, ...], jobs: int
) -> Iterator[list[Line]]:
    """Lines as they come; each process keeps to one thread of the library."""
    chunks = [(names[i : i + CHUNK], backend, implementations) for i in range(0, len(names), CHUNK)]
    jobs = min(jobs, len(chunks))
    if jobs <= 1:
        yield from map(run_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _initialise, (jobs,)) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def _initialise(jobs: int) -> None:
    cores = os.cpu_count() or 1
    os.environ.setdefault("FULMEN_NUM_THREADS", str(max(cores // jobs, 2)))


def run_chunk(chunk: tuple[list[str], str, tuple[str, ...]]) -> list[Line]:
    """Runs cases by name: what a process does."""
    from fulmen.cases import find, run_case

    names, backend, implementations = chunk
    lines = []
    for case in find(*names):
        for implementation in implementations:
            outcome = run_case(case, backend, implementation)
            lines.append(
                (case.name, implementation, outcome.status, float(outcome.ratio), outcome.message)
            )
    return lines


def _list(cases: Any, output: Output) -> int:
    if output.as_json:
        output.json([{"name": c.name, "tags": list(c.tags), "note": c.note} for c in cases])
    else:
        output.table(("case", "tags", "note"), [(c.name, " ".join(c.tags), c.note) for c in cases])
    return 0


def _report(
    lines: list[Line], implementations: tuple[str, ...], seconds: float, output: Output
) -> None:
    counts = Counter(line[2] for line in lines)
    bad = sorted(line for line in lines if line[2] == "failed")
    if bad:
        output.table(
            ("case", "implementation", "of allowed", "what"),
            [(name, how, f"{ratio:.3g}", said) for name, how, _, ratio, said in bad],
            lambda _: BAD,
        )
        output.line()
    worst = []
    for how in implementations:
        mine = [line for line in lines if line[1] == how]
        each = Counter(line[2] for line in mine)
        ratio, name = max(((x[3], x[0]) for x in mine if x[2] == "passed"), default=(0.0, ""))
        worst.append((how, *(str(each[s]) for s in ("passed", "failed", "skipped")),
                      f"{ratio:.2f}", name))  # fmt: skip
    columns = ("implementation", "passed", "failed", "skipped", "largest of allowed", "in case")
    output.table(columns, worst)
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
