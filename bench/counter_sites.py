# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Accesses to shared memory, line by line: what the emulator counts and what ncu sees on a GPU.

python bench/counter_sites.py CARD FILE SOURCE.CSV CUBIN ...

FILE is from `bench/counters.py emulate`. SOURCE.CSV is what `ncu --import REPORT --page source
--csv` prints of a report with `--section SourceCounters` of `bench/counters.py run`. The cubins, in
order of the calls, have line numbers: FULMEN_NVRTC named a library that asks NVRTC for -lineinfo
too. A line is that which calls a function of kernels/ptx; nvdisasm finds it.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import defaultdict
from typing import Any

from counters import SHAPES, record

COLUMNS = {
    "accesses": "Instructions Executed",
    "wavefronts": "L1 Wavefronts Shared",
    "conflicts": "L1 Wavefronts Shared Excessive",
}
INSTRUCTION = re.compile(r"\b(LDS|STS|LDSM|STSM)\b")


def lines_of(cubin: str) -> dict[int, str]:
    """Offsets of instructions, and the line of the kernel's text that each belongs to."""
    said = subprocess.run(
        ["nvdisasm", "-gi", "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    found: dict[int, str] = {}
    chain: list[str] = []  # from the innermost inlined function outwards
    begun = False
    for line in said.splitlines():
        if at := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
            chain = [*(chain if begun else []), f"{at[1].partition('kernels/')[2]}:{at[2]}"]
            begun = True
        elif at := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            own = [x for x in chain if not x.startswith("ptx/")]
            found[int(at[1], 16)] = f"kernels/{own[0]}" if own else "?"
            begun = False
    return found


def measured(rows: list[dict[str, str]], lines: dict[int, str]) -> dict[str, dict[str, int]]:
    """By line, what ncu saw of loads, stores, ldmatrix and stmatrix that happened."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    first = int(rows[0]["Address"], 16)
    for row in rows:
        if INSTRUCTION.search(row["Source"]) and int(row["L1 Wavefronts Shared"]):
            site = found[lines[int(row["Address"], 16) - first]]
            for name, column in COLUMNS.items():
                site[name] += int(row[column])
    return found


def counted(sites: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By line, what the emulator counted."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for site in sites:
        for name in COLUMNS:
            found[site["site"].partition(" in ")[0]][name] += site[name]
    return found


def kernels(path: str) -> list[list[dict[str, str]]]:
    """The rows of each kernel of ncu's source page."""
    found: list[list[dict[str, str]]] = []
    with open(path, encoding="utf-8") as file:
        for row in csv.reader(file):
            if row and row[0] == "Kernel Name":
                found.append([])
            elif row and row[0] == "Address":
                names = row
            elif row:
                found[-1].append(dict(zip(names, row)))
    return found


def main(card: str, emulated: str, source: str, *cubins: str) -> None:
    """Prints one line of JSON for each line of each call."""
    with open(emulated, encoding="utf-8") as file:
        calls = json.load(file)
    for shape, call, rows, cubin in zip(SHAPES, calls, kernels(source), cubins, strict=True):
        ours, theirs = counted(call["shared"]), measured(rows, lines_of(cubin))
        for site in sorted({*ours, *theirs}):
            found = {"site": site, "emulator": ours.get(site), "ncu": theirs.get(site)}
            print(record("counter_site", shape, card, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
