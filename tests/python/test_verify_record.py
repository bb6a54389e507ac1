# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen verify --record: what was found, as a file."""

from __future__ import annotations

import json
from pathlib import Path

import fulmen
from fulmen.cli import verify_record


def test_a_record_has_counts_failures_and_kernels(tmp_path: Path) -> None:
    lines = [
        ("u01_a", "simt", "passed", 0.5, "o: fine"),
        ("u01_a", "sm90", "skipped", 0.0, "needs Hopper"),
        ("u02_b", "simt", "failed", 2.0, "dq: off"),
    ]
    path = tmp_path / "record.json"
    verify_record.write(str(path), [], lines, 4)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["passed"], record["failed"], record["skipped"], record["not_run"]) == (
        1,
        1,
        1,
        4,
    )
    assert record["implementations"]["simt"] == {"passed": 1, "failed": 1, "skipped": 0}
    failure = {"case": "u02_b", "implementation": "simt", "message": "dq: off"}
    assert record["failures"] == [failure]
    assert record["cases"] == "all"
    info = fulmen.build_info()
    assert record["kernels"] == info["kernels"]
    assert record["commit"] == info["commit"]


def test_a_record_names_the_cases_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    verify_record.write(str(path), ["bug", "u0*"], [], 0)
    assert json.loads(path.read_text(encoding="utf-8"))["cases"] == ["bug", "u0*"]
