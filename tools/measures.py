# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the next change costs, counted: files to touch, listings, lengths, layers.

    measures.py             each measure: what it was, what it is, its limit and its goal
    measures.py --where     and the files, lines or functions that are counted

measures.txt holds the other three numbers; a measure above its limit fails, here and in
`make check`. Limits only fall: where one is above its goal, it is what has been reached. A new
option is written where an option of its kind stands today, so each file that names that one is a
file to touch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import import_layers
import private_words
from code_blocks import Block, blocks_of
from count_option import files_naming
from product_code import IDENTIFIER, Source, names, parts, product
from source_tree import ROOT

GOALS = Path("tools") / "measures.txt"

INPUT_ARRAYS = ["bias", "mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "cu_q",
                "cu_kv", "q_ids", "kv_ids", "rng"]  # fmt: skip
IMPLEMENTATIONS = ["naive", "simt", "sm80", "sm90"]
DTYPES = ["bfloat16", r"(?<!b)float16", "float32", "float64"]
OPTIONS = ["scale", "softcap", "causal", "alignment", "window_left", "window_right", "prefix",
           "chunk", "dropout_p", "rng_seed", "rng_offset", "max_q", "max_kv", "deterministic",
           "batch_invariant", "backend", "implementation", "device", "device_name", "without",
           "precision"]  # fmt: skip

_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
# A place in the list of arrays or numbers as a bare number; q, k and v are always the first three.
_LITERAL = re.compile(
    r"\b(?:arrays|inputs)\[(?:[3-9]|\d\d|:[4-9]|:\d\d)\b|\brange\(([3-9]|\d\d), \d+\)"
    r"|^[A-Z_]+ = \(\d+(?:, \d+){3,}\)"
    r"|\bconstexpr (?:size_t|u?int\w*|i32|i64) k\w+ = ([3-9]|\d\d);", re.MULTILINE
)  # fmt: skip


@cache
def _product(root: Path) -> list[Source]:
    return product(root)


def _src(root: Path) -> list[Source]:
    return [source for source in _product(root) if source.name.startswith("src/")]


def _outside_the_lab(root: Path) -> list[Source]:
    lab = ("python/fulmen/lab/", "python/fulmen/cases/", "python/fulmen/cli/")
    return [source for source in _product(root) if not source.name.startswith(lab)]


def option(name: str) -> Callable[[Path], list[str]]:
    return lambda root: [source.name for source in files_naming(root, name)]


def array_files(root: Path) -> list[str]:
    """Files that list the input arrays, kernels and the test lab apart."""
    wanted = [parts(name) for name in INPUT_ARRAYS]
    found = []
    for source in _outside_the_lab(root):
        if source.name.startswith("src/kernels/"):
            continue
        if sum(names(source.code, words) for words in wanted) >= len(wanted) - 2:
            found.append(source.name)
    return found


def array_literals(root: Path) -> list[str]:
    found = []
    for source in _outside_the_lab(root):
        is_binding = source.name.startswith(("python/", "src/ffi/"))
        if is_binding and not source.name.endswith(("abi.h", "abi.cpp")):
            for number, line in enumerate(source.code.splitlines(), start=1):
                count = len(_LITERAL.findall(line))
                found += [f"{source.name}:{number}"] * count
    return found


def implementation_files(root: Path) -> list[str]:
    """Files that enumerate the implementations on GPUs: name at least three of the four."""
    return [source.name for source in _product(root)
            if sum(names(source.code, parts(name)) for name in IMPLEMENTATIONS) >= 3]  # fmt: skip


def dtype_tables(root: Path) -> list[str]:
    """Files with the four floating-point types, and another, within a few lines."""
    return [source.name for source in _outside_the_lab(root) if _has_dtype_table(source.code)]


def _has_dtype_table(code: str) -> bool:
    lines = code.lower().splitlines()
    for first in range(len(lines)):
        few = "\n".join(lines[first : first + 5])
        around = "\n".join(lines[max(0, first - 3) : first + 9])
        if all(re.search(name, few) for name in DTYPES) and re.search("bool|int32|i32", around):
            return True
    return False


def option_listings(root: Path) -> list[tuple[str, bool]]:
    """Runs of lines that name twelve options and more, and whether by position."""
    found = []
    for source in _outside_the_lab(root):
        is_table = source.name.endswith(".def")  # a row an option, whatever is beside it
        found += [(f"{source.name}:{first}", by_position and not is_table)
                  for first, by_position in _listings(source.code)]  # fmt: skip
    return found


def _listings(code: str, least: int = 12, gap: int = 6) -> list[tuple[int, bool]]:
    options = {tuple(parts(name)) for name in OPTIONS}
    found: list[tuple[int, bool]] = []
    seen: dict[tuple[str, ...], bool] = {}  # whether by position
    first = last = 0

    def close() -> None:
        if len(seen) >= least:
            found.append((first, 2 * sum(seen.values()) > len(seen)))
        seen.clear()

    for number, line in enumerate(code.splitlines(), start=1):
        for match in IDENTIFIER.finditer(line):
            option = tuple(parts(match.group()))
            if option not in options:
                continue
            if number - last > gap or (option in seen and len(seen) >= least):
                close()
            if not seen:
                first = number
            seen.setdefault(option, _is_positional(line, match))
            last = number
    close()
    return found


def _is_positional(line: str, match: re.Match[str]) -> bool:
    after = line[match.end() :].lstrip()
    is_member = line[: match.start()].rstrip().endswith((".", "->"))
    return not is_member and after[:1] in ("", ",", ")", '"')


def lonely_headers(root: Path) -> list[str]:
    """Headers of src that at most one file includes beside their own .cpp."""
    users: dict[str, set[str]] = {}
    for source in _src(root):
        for target in _INCLUDE.findall(source.text):
            users.setdefault(target, set()).add(source.name.rpartition(".")[0])
    found = []
    for source in _src(root):
        stands_for = source.name.startswith("src/emulator/kernels/ptx/")  # another of that name
        if source.name.endswith((".h", ".cuh")) and not stands_for:
            own = source.name.rpartition(".")[0]
            if len(users.get(source.name.removeprefix("src/"), set()) - {own}) <= 1:
                found.append(source.name)
    return found


def _longest(root: Path, chosen: Callable[[Block], bool]) -> tuple[int, str]:
    blocks = [block for source in _src(root) for block in blocks_of(source) if chosen(block)]
    longest = max(blocks, key=lambda block: block.lines)
    return longest.lines, str(longest)


def longest_file(root: Path) -> tuple[int, str]:
    return max((source.text.count("\n"), source.name) for source in _src(root))


def longest_function(root: Path) -> tuple[int, str]:
    return _longest(root, lambda block: not block.is_loop)


def longest_loop(root: Path) -> tuple[int, str]:
    return _longest(root, lambda block: block.is_loop and block.name.startswith("src/kernels/"))


def call_files(kind: str) -> Callable[[Path], list[str]]:
    """The files that a Hopper call passes, from the list that architecture.md explains."""

    def listed(root: Path) -> list[str]:
        text = (root / "tools" / "call_path.txt").read_text(encoding="utf-8")
        lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        passed = [name for kinds, name in lines if kind in kinds.split(",")]
        missing = [name for name in passed if not (root / name).is_file()]
        if missing:
            raise SystemExit(f"tools/call_path.txt names {', '.join(missing)}: there is none")
        return passed

    return listed


Counted = list[str] | tuple[int, str]

MEASURES: dict[str, Callable[[Path], Counted]] = {
    "files that name a mask option (prefix)": option("prefix"),
    "files that name a host's flag (batch_invariant)": option("batch_invariant"),
    "files that name a score modifier (softcap)": option("softcap"),
    "files that list the input arrays": array_files,
    "literal indices of arrays": array_literals,
    "files that enumerate implementations": implementation_files,
    "dtype tables": dtype_tables,
    "listings of the options": lambda root: [where for where, _ in option_listings(root)],
    "listings by position": lambda root: [where for where, bare in option_listings(root) if bare],
    "headers with at most one user": lonely_headers,
    "files in src": lambda root: [source.name for source in _src(root)],
    "lines of the longest file in src": longest_file,
    "lines of the longest function in src": longest_function,
    "lines of the longest loop of a kernel": longest_loop,
    "private words in src": lambda root: [str(finding) for finding in private_words.check(root)],
    "import layers of python/fulmen": lambda root: [
        " ".join(layer) for layer in import_layers.layers(import_layers.imports(root))],
    "import circles of python/fulmen": lambda root: [
        " ".join(circle) for circle in import_layers.circles(import_layers.imports(root))],
    "files that a warm Hopper call passes": call_files("warm"),
    "files that a first Hopper call passes": call_files("first"),
}  # fmt: skip


def limits(root: Path) -> dict[str, tuple[int, int, int]]:
    """measure -> what it was, its limit, its goal."""
    found = {}
    for line in (root / GOALS).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, numbers = line.rpartition(":")
            before, limit, goal = map(int, numbers.split(","))
            found[name] = (before, limit, goal)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Prints the measures; 1 if one is above its limit."
    )
    parser.add_argument("--where", action="store_true", help="show what is counted")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    numbers = limits(ROOT)
    too_many = []
    print(f"{'measure':<50}{'was':>6}{'is':>6}{'limit':>7}{'goal':>6}")
    for name, count in MEASURES.items():
        counted = count(root)
        number = counted[0] if isinstance(counted, tuple) else len(counted)
        before, limit, goal = numbers[name]
        mark = "  too many" if number > limit else ""
        print(f"{name:<50}{before:>6}{number:>6}{limit:>7}{goal:>6}{mark}")
        if mark:
            too_many.append(name)
        if arguments.where and number:
            items = [counted[1]] if isinstance(counted, tuple) else counted
            print("".join(f"    {item}\n" for item in items), end="")
    print(f"measures: {len(too_many)} of {len(MEASURES)} above their limit")
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
