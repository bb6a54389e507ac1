# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plants faults into the text of GPU kernels, one at a time, and names those that no test sees.

    plant_faults.py [--only NAME...] [--jobs N]    builds the preset `audit` and runs its tests
    plant_faults.py --programs FOLDER              runs those in a copy of the build's folder, and
                                                   builds nothing: on a machine with more cores
    plant_faults.py --record FILE                  writes what became of them, by names, for a page
    plant_faults.py --check                        each old text is there, once
    plant_faults.py --write FOLDER                 the kernels' text, with every fault in it

tests/emulator/planted/faults.toml lists the faults. All of them are compiled at once, each behind
`is_planted(..)`, so that one build serves all; the environment's FULMEN_PLANTED names the one
that is on. A fault is found when a test fails: first those that `found_by` names are run, and only
where they pass all others, side by side. With none planted the same tests must pass. What
`--seconds` leaves no time for is unjudged, and counts as if it had passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import tomllib

from source_tree import ROOT, Finding
from verified import digest_of_kernels

FAULTS = Path("tests/emulator/planted/faults.toml")
KERNELS = Path("src/kernels")
INSTRUCTIONS = "ptx/"  # the emulator has its own
BUILD = ROOT / "build" / "audit"
PROGRAMS = {
    "emulator_sm80_test": "tests/emulator/sm80",
    "emulator_sm90_test": "tests/emulator/sm90",
    "emulator_test": "tests/emulator",
    "gpu_kernels_test": "tests/gpu",
}
NOT_ON_THE_EMULATOR = "-CompileKernels.*"
TIMEOUT_SECONDS = 1200
_DECLARATION = re.compile(
    r"(?!return\b|else\b)(const )?[\w:]+(<[^;]*?>)?[ *&]+(const )?\w+(\[\w*\])*( = |\{)"
)

# A part of an expression that begins or ends with what joins it to the rest.
_HALF_EXPRESSION = re.compile(
    r"^(return|throw|if|else|for|while)\b|^(&&|\|\||[=<>/%^|?:,.]|[-+*&] )|[-+*/%&|^=<!?:,.]$"
)


@dataclass(frozen=True)
class Fault:
    """One entry of faults.toml, whose head says what the fields are."""

    name: str
    file: str
    old: str
    new: str
    why: str
    found_by: str
    context: str = ""

    def place(self, text: str) -> int:
        """Where the old text is; -1 unless it is there exactly once."""
        context = self.context or self.old
        if text.count(context) != 1 or context.count(self.old) != 1:
            return -1
        return text.index(context) + context.index(self.old)

    @property
    def is_statement(self) -> bool:
        """Whole statements become branches of an `if`, anything else an expression's."""
        return _on_one_line(self.old).endswith((";", "}"))

    def shape_error(self) -> str:
        """What keeps the old text from being a branch; "" if nothing does."""
        texts = text, _ = _on_one_line(self.old), _on_one_line(self.new)
        if any(t.count(a) != t.count(b) for t in texts for a, b in ("()", "[]", "{}")):
            return "its old or new text has half of a pair of brackets"
        if self.is_statement and any(map(_DECLARATION.match, _statements(text))):
            return "its old text declares a name, which a branch would hide: take the expression"
        if not self.is_statement and any(map(_is_no_expression, texts)):
            return "its old or new text is neither an expression nor statements"
        return ""

    def place_error(self, before: str) -> str:
        """What keeps a branch from standing after the text before it; "" if nothing does."""
        joined = re.sub(r"//[^\n]*|^ *#[^\n]*", "", before, flags=re.MULTILINE).rstrip()
        if self.is_statement and not re.search(r"([;{}:)]|\belse)$", joined):
            return "its old text is the end of a statement: take the expression without its ';'"
        if not self.is_statement and re.search(r"(?<!if )\bconstexpr\b[^;{}]*$", joined):
            return "its old text is in a constant, which no fault can change when it runs"
        return ""

    @property
    def number(self) -> int:
        """Of the name alone, so that a new fault changes no other's text."""
        return zlib.crc32(self.name.encode()) >> 1


def read_faults(root: Path) -> list[Fault]:
    listed = tomllib.loads((root / FAULTS).read_text(encoding="utf-8"))["fault"]
    return [Fault(**entry) for entry in listed]


def check(root: Path) -> list[Finding]:
    """What is wrong with the list: names, and old texts that are not in their file exactly once."""
    findings = []
    numbers: set[int] = set()
    for fault in read_faults(root):
        if fault.number in numbers:
            findings.append(Finding(str(FAULTS), 0, f"{fault.name} is there twice"))
        numbers.add(fault.number)
        if wrong := fault.shape_error():
            findings.append(Finding(str(FAULTS), 0, f"{fault.name}: {wrong}"))
        path = root / KERNELS / fault.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        place = fault.place(text)
        if place < 0:
            said = f"{fault.name}: its old text is not in {KERNELS / fault.file} exactly once"
            findings.append(Finding(str(FAULTS), 0, said))
        elif wrong := fault.place_error(text[:place]):
            findings.append(Finding(str(FAULTS), 0, f"{fault.name}: {wrong}"))
    return findings


def _statements(text: str) -> list[str]:
    """Those outside of braces, each up to its end or its first brace."""
    depths = list(accumulate((c == "{") - (c == "}") for c in text))
    outside = (c for c, depth in zip(text, depths, strict=True) if depth == (c == "{"))
    return [statement.lstrip() for statement in re.split("[;}]", "".join(outside))]


def _is_no_expression(text: str) -> bool:
    has_half = text.count("?") != len(re.findall("(?<!:):(?!:)", text))
    return not text or ";" in text or has_half or _HALF_EXPRESSION.search(text) is not None


def _on_one_line(text: str) -> str:
    """Without comments, so that a brace may follow, and without line ends."""
    return " ".join(re.sub(r"//[^\n]*", "", text).split())


def plant(text: str, faults: Sequence[Fault]) -> str:
    """The text of a file with its faults in it; every line keeps its number."""
    places: dict[tuple[int, str], list[Fault]] = {}
    for fault in faults:
        places.setdefault((fault.place(text), fault.old), []).append(fault)
    next_begin = len(text)
    for (begin, old), alternatives in sorted(places.items(), reverse=True):
        if not 0 <= begin <= begin + len(old) <= next_begin:
            raise SystemExit(f"{alternatives[0].name}: its old text overlaps another's")
        next_begin = begin
        text = text[:begin] + _alternatives(old, alternatives) + text[begin + len(old) :]
    lines = text.split("\n")
    lines[1] = '#include "emulator/planted/planted.h"'  # where the licence was named
    return "\n".join(lines)


def _alternatives(old: str, faults: Sequence[Fault]) -> str:
    if faults[0].is_statement:
        tests = "".join(
            f"if (::fulmen::is_planted({f.number})) {{ {_on_one_line(f.new)} }} else "
            for f in faults
        )
        kept = re.sub(r"//[^\n]*", "", old)
        return f"{tests}{{ {kept} }}"
    tests = "".join(
        f"::fulmen::is_planted({f.number}) ? ({_on_one_line(f.new)}) : " for f in faults
    )
    return f"({tests}({old}))"


def write(root: Path, folder: Path) -> None:
    """All kernels' text below FOLDER/kernels, and the names of the faults in FOLDER/faults.inc."""
    if findings := check(root):
        raise SystemExit("\n".join(map(str, findings)))
    faults = read_faults(root)
    for path in sorted((root / KERNELS).rglob("*.cuh")):
        name = path.relative_to(root / KERNELS).as_posix()
        if name.startswith(INSTRUCTIONS):
            continue
        own = [fault for fault in faults if fault.file == name]
        text = path.read_text(encoding="utf-8")
        _write_if_other(folder / "kernels" / name, plant(text, own) if own else text)
    names = "".join(f'{{"{fault.name}", {fault.number}}},\n' for fault in faults)
    _write_if_other(folder / "faults.inc", names)
    os.utime(folder / "faults.inc")  # newer than what it was made of


def _write_if_other(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build() -> None:
    parallel = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--preset", "audit"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", "--preset", "audit", "--parallel", parallel, "--target"]
    subprocess.run([*command, *PROGRAMS], cwd=ROOT, check=True)


class OutOfTimeError(Exception):
    """The time of the whole run is over: what a test would have said is not known."""


@dataclass(frozen=True)
class Judge:
    """Runs the tests of programs below a folder laid out as the build's."""

    programs: Path
    pool: ThreadPoolExecutor
    jobs: int
    ends: float  # of time.monotonic()
    counts: Path  # for lines that ran with a fault: nobody reads them

    def run_tests(self, program: str, tests: str, planted: str, shard: int = -1) -> str:
        """The first test of the program (of one of as many shards as jobs) that fails, or ""."""
        environment = {**os.environ, "FULMEN_NUM_THREADS": "1"}
        if planted:
            environment |= {"FULMEN_PLANTED": planted, "GCOV_PREFIX": str(self.counts)}
        if shard >= 0:
            environment |= {"GTEST_TOTAL_SHARDS": str(self.jobs), "GTEST_SHARD_INDEX": str(shard)}
        command = [
            str(self.programs / PROGRAMS[program] / program),
            f"--gtest_filter={tests}{NOT_ON_THE_EMULATOR}",
        ]
        left = self.ends - time.monotonic()
        try:
            done = subprocess.run(
                [*command, "--gtest_fail_fast", "--gtest_brief=1"],
                env=environment, capture_output=True, text=True, errors="replace", check=False,
                timeout=max(0.0, min(TIMEOUT_SECONDS, left)),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            if left < TIMEOUT_SECONDS:
                raise OutOfTimeError from error
            return f"{program}, which did not end"
        if done.returncode == 0:
            return ""
        if "faults.toml has no such fault" in done.stderr:  # planted.cpp
            raise SystemExit(f"{program} was built without the fault {planted}")
        failed = re.search(r"\[  FAILED  \] (\S+)", done.stdout)
        if failed:
            return failed.group(1).rstrip(",")
        return f"{program}, which ended {done.returncode}"

    def as_listed(self, fault: Fault) -> Verdict:
        """By the tests that the list names for it, one program after the other."""
        began = time.monotonic()
        ran = (self.run_tests(program, fault.found_by, fault.name) for program in PROGRAMS)
        try:
            found = next((failed for failed in ran if failed), "")
        except OutOfTimeError:
            return Verdict(fault, began, None)
        return Verdict(fault, began, found)

    def failing(self, tests: str, planted: str) -> str | None:
        """The first of these tests that fails, "" if none does; None: unjudged. Side by side."""
        runs = [
            self.pool.submit(self.run_tests, program, tests, planted, shard)
            for shard in range(self.jobs)
            for program in PROGRAMS
        ]
        try:
            return next((run.result() for run in as_completed(runs) if run.result()), "")
        except OutOfTimeError:
            return None
        finally:
            for run in runs:
                run.cancel()


class Verdict:
    """What became of a fault. `found_by`: a test, or what became of a program; "": it passed."""

    def __init__(self, fault: Fault, began: float, found_by: str | None) -> None:
        self.fault = fault
        self.found_by = found_by  # None: unjudged
        self.seconds = time.monotonic() - began

    @property
    def outcome(self) -> str:
        if self.found_by is None:
            return "unjudged"
        return "found" if self.found_by else "passed"

    def __str__(self) -> str:
        said = f"found by {self.found_by}" if self.found_by else "PASSED EVERY TEST"
        if self.found_by is None:
            said = "UNJUDGED"
        return f"{self.fault.name:<32} {self.seconds:6.1f} s  {said}"


def _verdicts(judge: Judge, faults: Sequence[Fault]) -> Iterator[Verdict]:
    """One a fault, as they come."""
    passed = []
    for run in as_completed([judge.pool.submit(judge.as_listed, fault) for fault in faults]):
        verdict = run.result()
        if verdict.found_by == "":
            passed.append(verdict.fault)
        else:
            yield verdict
    for fault in passed:
        began = time.monotonic()
        yield Verdict(fault, began, judge.failing("*", fault.name))


def commit() -> str:
    """Of this tree; "" where programs run in a copy of a part of it."""
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return said.stdout.strip()


def record_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What a page says of a run, as `fulmen verify --record` has it."""
    names: dict[str, list[str]] = {"found": [], "passed": [], "unjudged": []}
    for verdict in verdicts:
        names[verdict.outcome].append(verdict.fault.name)
    return {
        "commit": commit(),
        "kernels": digest_of_kernels(ROOT),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "planted": len(verdicts),
        "found": len(names["found"]),
        "passed": sorted(names["passed"]),
        "unjudged": sorted(names["unjudged"]),
    }


def run(judge: Judge, only: Sequence[str], record: Path | None = None) -> int:
    faults = {fault.name: fault for fault in read_faults(ROOT)}
    if unknown := set(only) - faults.keys():
        raise SystemExit(f"{FAULTS} has no fault {', '.join(sorted(unknown))}")
    chosen = [faults[name] for name in only] if only else list(faults.values())
    tests = ":".join(sorted({fault.found_by for fault in chosen})) if only else "*"
    if failed := judge.failing(tests, ""):
        raise SystemExit(f"{failed} fails with no fault planted")
    if failed is None:
        raise SystemExit("no time for the tests with no fault planted")
    verdicts = []
    for verdict in _verdicts(judge, chosen):
        verdicts.append(verdict)
        print(verdict, flush=True)
    outcome = record_of(verdicts)
    if record is not None:
        record.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    for kind in ("passed", "unjudged"):
        if outcome[kind]:
            print(f"{kind}: {', '.join(outcome[kind])}")
    print(f"{outcome['planted']} faults planted, {outcome['found']} found")
    return 0 if outcome["found"] == outcome["planted"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults into the text of GPU kernels.")
    parser.add_argument("--check", action="store_true", help="whether the list fits the kernels")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write the planted text")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="build nothing, run these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for the whole run")
    parser.add_argument("--record", type=Path, metavar="FILE", help="what became of them, as JSON")
    arguments = parser.parse_args()
    if arguments.write:
        write(ROOT, arguments.write)
        return 0
    if arguments.check:
        findings = check(ROOT)
        print(*findings, f"{len(findings)} finding(s)", sep="\n")
        return 1 if findings else 0
    programs = arguments.programs or BUILD
    if arguments.programs is None:
        build()
    ends = time.monotonic() + arguments.seconds
    with ThreadPoolExecutor(arguments.jobs) as pool, tempfile.TemporaryDirectory() as counts:
        judge = Judge(programs, pool, arguments.jobs, ends, Path(counts))
        return run(judge, arguments.only, arguments.record)


if __name__ == "__main__":
    sys.exit(main())
