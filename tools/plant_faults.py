# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plants faults into the text of GPU kernels, one at a time, and names those that no test sees.

    plant_faults.py [--only NAME...] [--jobs N]    builds the preset `audit` and runs its tests
    plant_faults.py --check                        each old text is there, once
    plant_faults.py --write FOLDER                 the kernels' text, with every fault in it

tests/emulator/planted/faults.toml lists the faults. All of them are compiled at once, each behind
`is_planted(..)`, so that one build serves all; the environment's FULMEN_PLANTED names the one
that is on. A fault is found when a test fails: first those that `found_by` names are run, and only
where they pass all others. With none planted the same tests must pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomllib

from source_tree import ROOT, Finding

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
        text = _on_one_line(self.old)
        if self.is_statement and _DECLARATION.match(text):
            return "its old text declares a name, which a branch would hide: take the expression"
        if not self.is_statement and ";" in text:
            return "its old text is neither an expression nor statements"
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
        if not path.exists() or fault.place(path.read_text(encoding="utf-8")) < 0:
            said = f"{fault.name}: its old text is not in {KERNELS / fault.file} exactly once"
            findings.append(Finding(str(FAULTS), 0, said))
    return findings


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


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    found_by: str  # a test, or what became of the program; "" if nothing saw it
    seconds: float


def run_tests(program: str, tests: str, planted: str) -> str:
    """The first test of the program that fails; "" if none does."""
    environment = {**os.environ, "FULMEN_PLANTED": planted, "GCOV_PREFIX": str(BUILD / "uncounted")}
    if not planted:
        del environment["FULMEN_PLANTED"]
    command = [
        str(BUILD / PROGRAMS[program] / program),
        f"--gtest_filter={tests}{NOT_ON_THE_EMULATOR}",
    ]
    try:
        done = subprocess.run(
            [*command, "--gtest_fail_fast", "--gtest_brief=1"],
            env=environment, capture_output=True, text=True, errors="replace", check=False,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{program}, which did not end"
    if done.returncode == 0:
        return ""
    failed = re.search(r"\[  FAILED  \] (\S+)", done.stdout)
    return failed.group(1).rstrip(",") if failed else f"{program}, which ended {done.returncode}"


def judge(fault: Fault) -> Verdict:
    began = time.monotonic()
    found = ""
    for tests in (fault.found_by, "*"):
        for program in PROGRAMS:
            found = found or run_tests(program, tests, fault.name)
        if found:
            break
    return Verdict(fault, found, time.monotonic() - began)


def run(only: Sequence[str], jobs: int) -> int:
    faults = read_faults(ROOT)
    unknown = set(only) - {fault.name for fault in faults}
    if unknown:
        raise SystemExit(f"{FAULTS} has no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not only or fault.name in only]
    tests = ":".join(sorted({fault.found_by for fault in chosen}))
    with ThreadPoolExecutor(jobs) as pool:
        for failed in pool.map(lambda program: run_tests(program, tests, ""), PROGRAMS):
            if failed:
                raise SystemExit(f"{failed} fails with no fault planted")
        missed = 0
        for verdict in pool.map(judge, chosen):
            missed += not verdict.found_by
            said = f"found by {verdict.found_by}" if verdict.found_by else "PASSED EVERY TEST"
            print(f"{verdict.fault.name:<32} {verdict.seconds:6.1f} s  {said}", flush=True)
    print(f"{len(chosen)} faults planted, {missed} passed")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults into the text of GPU kernels.")
    parser.add_argument("--check", action="store_true", help="whether the list fits the kernels")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write the planted text")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    arguments = parser.parse_args()
    if arguments.write:
        write(ROOT, arguments.write)
        return 0
    if arguments.check:
        findings = check(ROOT)
        print(*findings, f"{len(findings)} finding(s)", sep="\n")
        return 1 if findings else 0
    build()
    return run(arguments.only, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
