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


def failures(path: str) -> set[tuple[str, str]]:
    """Case and implementation of each failure in a record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no record, or one of other kernels.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    kernels = fulmen.build_info()["kernels"]
    if record.get("kernels") != kernels:
        raise ValueError(f"{path} is of other kernels than this build; run every case again")
    return {(each["case"], each["implementation"]) for each in record["failures"]}


def amend(path: str, lines: Sequence[tuple[str, str, str, float, str]]) -> None:
    """Puts what a later run found in the place of failures of a record.

    Args:
        path: of the record, which is replaced.
        lines: as of write(), of runs that the record has as failures.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    found = {(name, how): (status, said) for name, how, status, _, said in lines}
    for (_, how), (status, _) in found.items():
        for part in (record, record["implementations"][how]):
            part["failed"] -= 1
            part[status] += 1
    kept = []
    for failure in record["failures"]:
        status, said = found.get(
            (failure["case"], failure["implementation"]), ("failed", failure["message"])
        )
        if status == "failed":
            kept.append({**failure, "message": said})
    record["failures"] = kept
    record["run_again"] = record.get("run_again", 0) + len(found)
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write(
    path: str, asked: Sequence[str], lines: Sequence[tuple[str, str, str, float, str]], left: int
) -> None:
    """Writes the record as JSON.

    Args:
        path: of the file, which is replaced.
        asked: names, patterns and tags that the run was given; none: every case.
        lines: (case, implementation, status, ratio, message) of every run.
        left: cases that were not run.

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
        "not_run": left,
        **counts(line[2] for line in lines),
        "implementations": {
            how: counts(line[2] for line in lines if line[1] == how)
            for how in dict.fromkeys(line[1] for line in lines)
        },
        "failures": [
            {"case": name, "implementation": how, "message": said}
            for name, how, status, _, said in sorted(lines)
            if status == "failed"
        ],
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
