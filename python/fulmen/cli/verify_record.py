# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a run of `fulmen verify` found, as a file: of which kernels, where, and how many passed.

The README quotes it, and `tools/docs_tables.py` says whether it is of the kernels that are there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fulmen

STATUSES = ("passed", "failed", "skipped")

Line = tuple[str, str, str, float, str]  # case, implementation, status, ratio, message


def _machine() -> dict[str, Any]:
    """What computed: cards, driver and compiler, where there are any."""
    found = fulmen.gpu_info()
    return {
        "cards": sorted({device["name"] for device in found["devices"]}),
        "driver": (found["driver"] or {}).get("version"),
        "nvrtc": (found["nvrtc"] or {}).get("version"),
        "isa": fulmen.build_info()["isa"],
    }


def counts(statuses: Iterable[str]) -> dict[str, int]:
    """How many of each."""
    found = Counter(statuses)
    return {status: found[status] for status in STATUSES}


def unfinished(path: str) -> set[tuple[str, str]]:
    """Case and implementation of each run that a record has as failed, or for which it had no time.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no record, or one of other kernels.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    kernels = fulmen.build_info()["kernels"]
    if record.get("kernels") != kernels:
        raise ValueError(f"{path} is of other kernels than this build; run every case again")
    failed = {(each["case"], each["implementation"]) for each in record["failures"]}
    return failed | {(name, how) for name, ways in record.get("left", {}).items() for how in ways}


def amend(path: str, lines: Sequence[Line]) -> None:
    """Puts what a later run found in the place of failures of a record, and of what it left.

    Args:
        path: of the record, which is replaced.
        lines: as of write(), of runs that unfinished() names.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    failed = {(each["case"], each["implementation"]) for each in record["failures"]}
    found = {line[:2]: line for line in lines}
    for (name, how), line in found.items():
        for part in (record, record["implementations"].setdefault(how, counts(()))):
            part["failed"] -= (name, how) in failed
            part[line[2]] += 1
    kept = [f for f in record["failures"] if (f["case"], f["implementation"]) not in found]
    record["failures"] = _in_order([*kept, *_failures(lines)])
    left = [(name, how) for name, ways in record.get("left", {}).items() for how in ways]
    record |= _left([run for run in left if run not in found])
    record["run_again"] = record.get("run_again", 0) + len(found.keys() & failed)
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _failures(lines: Sequence[Line]) -> list[dict[str, str]]:
    return [
        {"case": name, "implementation": how, "message": said}
        for name, how, status, _, said in lines
        if status == "failed"
    ]


def _in_order(failures: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(failures, key=lambda each: (each["case"], each["implementation"]))


def _left(runs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """How many cases were not run, or not on all implementations, and on which not."""
    left: dict[str, list[str]] = {}
    for name, how in sorted(runs):
        left.setdefault(name, []).append(how)
    return {"not_run": len(left), "left": left}


def write(
    path: str, asked: Sequence[str], lines: Sequence[Line], left: Iterable[tuple[str, str]]
) -> None:
    """Writes the record as JSON.

    Args:
        path: of the file, which is replaced.
        asked: names, patterns and tags that the run was given; none: every case.
        lines: (case, implementation, status, ratio, message) of every run.
        left: case and implementation of what was not run.

    Raises:
        OSError: the file cannot be written.
    """
    build = fulmen.build_info()
    record = {
        "fulmen": build["version"],
        "commit": build["commit"],
        "kernels": build["kernels"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        **_machine(),
        "cases": list(asked) or "all",
        **_left(left),
        **counts(line[2] for line in lines),
        "implementations": {
            how: counts(line[2] for line in lines if line[1] == how)
            for how in dict.fromkeys(line[1] for line in lines)
        },
        "failures": _in_order(_failures(lines)),
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
