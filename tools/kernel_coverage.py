# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists the statements of GPU kernels that no test of the emulator reaches.

    kernel_coverage.py              builds the preset `audit`, runs its tests, lists
    kernel_coverage.py --no-run     lists what the last run did not reach
    kernel_coverage.py --check      whether the list of exceptions fits the kernels

It fails where a statement is reached by no test and is no exception of unreached.toml, and where a
test reaches an exception. gcov counts the lines of what was compiled. A branch of `if constexpr`
that no test's config takes makes no code, so that it has no count: statements are found in the
text, and one is reached if a line of it ran in any instantiation, or, where the compiler left
nothing of it, another of its block.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomllib

from plant_faults import BUILD, INSTRUCTIONS, NOT_ON_THE_EMULATOR, PROGRAMS, build
from source_tree import ROOT, Finding

KERNELS = ROOT / "src" / "kernels"
EXCEPTIONS = ROOT / "tests" / "emulator" / "planted" / "unreached.toml"

# Statements of which no code is made, or none that is theirs alone.
_SILENT = re.compile(
    r"(static_assert|static constexpr|constexpr|using|template|struct|class|enum|friend|case"
    r"|default|public|private|extern|\[\[maybe_unused\]\] [^=(]*$|(else|do|break|continue)$)\b"
)
_CONSTEXPR = re.compile(r"^(else )?if constexpr (?=\()")
_DECLARATION = re.compile(
    r"(?!return\b)(typename )?[\w:]+(<[^()=]*>)?(::\w+)*[ &*]+\w+(\[[^=]*\])*(, \w+(\[.*\])*)*$"
)
# What such a lambda computes is computed by the compiler.
_CONSTANT = re.compile(r"constexpr [^;{]*= \[\] ?(\(\) ?)?$")
_TYPE = re.compile(r"(^|>\s*|\s)(struct|class|union|enum|namespace)\b[^()=]*$")


@dataclass(frozen=True)
class Statement:
    first: int  # lines, from 1
    last: int
    text: str  # on one line
    block: int  # where its block begins: its statements run together


def without_comments(text: str) -> str:
    """Comments and lines of the preprocessor become blanks; lines stay where they are."""
    text = re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)
    return re.sub(r"(?m)^[ \t]*#[^\n]*", lambda m: " " * len(m.group()), text)


def _opens_block(before: str) -> bool:
    """Whether a brace behind this text opens a block, and not a list of values."""
    if not before or before[-1] not in " \n":
        return False
    return not re.search(r"([=,({?]|\breturn)$", before.rstrip())


def _behind_constexpr(said: str) -> str:
    """What `if constexpr (...)` decides about, "" where that is a block."""
    while match := _CONSTEXPR.match(said):
        said = said[match.end() :]
        depth = 0
        for at, character in enumerate(said):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                said = said[at + 1 :].strip()
                break
    return said


def statements(text: str) -> Iterator[Statement]:
    """Those in bodies of functions, as far as code is made of them."""
    text = without_comments(text)
    scopes: list[bool] = []  # of each open block: whether it is in a function
    blocks: list[int] = [0]  # where each begins
    values = 0  # open lists of values
    parentheses = [0]
    begin = 0  # of the statement

    def statement(end: int) -> Iterator[Statement]:
        body = text[begin:end]
        whole = " ".join(body.split())
        said = _behind_constexpr(whole)
        if not (scopes and scopes[-1]) or not re.search(r"\w", said):
            return
        if _SILENT.match(said) or _DECLARATION.match(said):
            return
        first = text.count("\n", 0, begin + len(body) - len(body.lstrip())) + 1
        block = begin if said != whole else blocks[-1]
        yield Statement(first, text.count("\n", 0, end) + 1, said, block)

    for at, character in enumerate(text):
        if character == "{" and values == 0 and _opens_block(text[max(0, at - 80) : at]):
            head = text[begin:at]
            yield from statement(at)
            in_function = bool(scopes and scopes[-1])
            said = " ".join(head.split())
            makes_code = _TYPE.search(said) is None and _CONSTANT.search(said) is None
            scopes.append(makes_code if not in_function else _CONSTANT.search(said) is None)
            blocks.append(at)
            parentheses.append(0)
            begin = at + 1
        elif character == "{":
            values += 1
        elif character == "}" and values > 0:
            values -= 1
        elif character == "}":
            yield from statement(at)
            scopes.pop()
            blocks.pop()
            parentheses.pop()
            begin = at + 1
        elif character == "(":
            parentheses[-1] += 1
        elif character == ")":
            parentheses[-1] -= 1
        elif character == ";" and parentheses[-1] <= 0 and values == 0:
            yield from statement(at)
            parentheses[-1] = 0
            begin = at + 1


def run_tests() -> None:
    for old in BUILD.rglob("*.gcda"):
        old.unlink()
    programs = [str(BUILD / folder / program) for program, folder in PROGRAMS.items()]

    def run(program: str) -> None:
        command = [program, f"--gtest_filter=*{NOT_ON_THE_EMULATOR}", "--gtest_brief=1"]
        subprocess.run(command, cwd=ROOT, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # counts of shared objects are merged
        list(pool.map(run, programs))


def _lines_of(counts: Path) -> list[tuple[str, int, int]]:
    """File below src/kernels, line and count of one object's instantiations."""
    command = ["gcov", "--json-format", "--stdout", str(counts)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=counts.parent)
    if shown.returncode != 0:
        raise SystemExit(f"{counts.name} counts another build; run without --no-run")
    found = []
    for line in shown.stdout.splitlines():
        for file in json.loads(line)["files"]:
            path = re.search(r"(?:^|/)(?:planted|src)/kernels/(.*)", file["file"])
            if path:
                found += [(path[1], at["line_number"], at["count"]) for at in file["lines"]]
    return found


def read_counts() -> dict[str, dict[int, int]]:
    """How often lines ran, of all objects together."""
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    objects = [path for path in BUILD.rglob("*.gcda") if "uncounted" not in path.parts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines in pool.map(_lines_of, objects):
            for file, line, count in lines:
                counts[file][line] += count
    return counts


def unreached(counts: dict[str, dict[int, int]]) -> Iterator[tuple[str, Statement]]:
    for path in sorted(KERNELS.rglob("*.cuh")):
        name = path.relative_to(KERNELS).as_posix()
        if name.startswith(INSTRUCTIONS):
            continue
        own = counts.get(name, {})
        found = list(statements(path.read_text(encoding="utf-8")))
        ran = {s: [own[line] for line in range(s.first, s.last + 1) if line in own] for s in found}
        reached = {statement.block for statement in found if any(ran[statement])}
        for statement in found:
            if not any(ran[statement]) and (ran[statement] or statement.block not in reached):
                yield name, statement


def read_exceptions() -> dict[tuple[str, str], str]:
    """File below src/kernels and statement -> why no test reaches it."""
    listed = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8")).get("statement", [])
    return {(entry["file"], entry["text"]): entry["why"] for entry in listed}


def check() -> list[Finding]:
    """Exceptions whose statement is not in its file."""
    findings = []
    for file, text in read_exceptions():
        path = KERNELS / file
        found = statements(path.read_text(encoding="utf-8")) if path.exists() else ()
        if text not in {statement.text for statement in found}:
            findings.append(Finding(str(EXCEPTIONS.relative_to(ROOT)), 0, f"{file} has no: {text}"))
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description="Lists what no test of the emulator reaches.")
    parser.add_argument("--no-run", action="store_true", help="judge the counts that are there")
    parser.add_argument("--check", action="store_true", help="only the list of exceptions")
    arguments = parser.parse_args()
    if findings := check():
        print("\n".join(map(str, findings)))
        return 1
    if arguments.check:
        return 0
    if not arguments.no_run:
        build()
        run_tests()
    found = list(unreached(read_counts()))
    exceptions = read_exceptions()
    unlisted = [(name, x) for name, x in found if (name, x.text) not in exceptions]
    for name, statement in unlisted:
        print(f"src/kernels/{name}:{statement.first}: {statement.text}")
    reached = exceptions.keys() - {(name, x.text) for name, x in found}
    for name, text in sorted(reached):
        print(f"{EXCEPTIONS.name}: {name}: a test reaches: {text}")
    print(f"{len(unlisted)} statements are not reached, {len(exceptions)} for a reason")
    return 1 if unlisted or reached else 0


if __name__ == "__main__":
    sys.exit(main())
