# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen verify --record: what was found, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fulmen
from fulmen.cli import verify, verify_record


def test_a_record_has_counts_failures_and_kernels(tmp_path: Path) -> None:
    lines = [
        ("u01_a", "simt", "passed", 0.5, "o: fine"),
        ("u01_a", "sm90", "skipped", 0.0, "needs Hopper"),
        ("u02_b", "simt", "failed", 2.0, "dq: off"),
    ]
    path = tmp_path / "record.json"
    verify_record.write(
        str(path), [], lines, {("u04_d", "simt"), ("u03_c", "sm90"), ("u03_c", "simt")}
    )
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["passed"], record["failed"], record["skipped"], record["not_run"]) == (
        1,
        1,
        1,
        2,
    )
    assert record["left"] == {"u03_c": ["simt", "sm90"], "u04_d": ["simt"]}
    assert record["implementations"]["simt"] == {"passed": 1, "failed": 1, "skipped": 0}
    failure = {"case": "u02_b", "implementation": "simt", "message": "dq: off"}
    assert record["failures"] == [failure]
    assert record["cases"] == "all"
    info = fulmen.build_info()
    assert record["kernels"] == info["kernels"]
    assert record["commit"] == info["commit"]


def test_a_record_names_the_cases_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    verify_record.write(str(path), ["bug", "u0*"], [], ())
    assert json.loads(path.read_text(encoding="utf-8"))["cases"] == ["bug", "u0*"]


def test_a_later_run_takes_the_place_of_failures(tmp_path: Path) -> None:
    lines = [
        ("one", "naive", "passed", 0.1, ""),
        ("one", "simt", "failed", 9.0, "OutOfMemoryError: first"),
        ("two", "simt", "failed", 9.0, "wrong"),
        ("two", "sm80", "failed", 9.0, "wrong"),
    ]
    path = str(tmp_path / "record.json")
    verify_record.write(path, [], lines, ())
    assert verify_record.unfinished(path) == {("one", "simt"), ("two", "simt"), ("two", "sm80")}
    verify_record.amend(
        path,
        [
            ("one", "simt", "passed", 0.2, ""),
            ("two", "simt", "skipped", 0.0, "no such"),
            ("two", "sm80", "failed", 9.0, "still"),
        ],
    )
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    assert (record["passed"], record["failed"], record["skipped"]) == (2, 1, 1)
    assert record["implementations"]["simt"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert record["failures"] == [{"case": "two", "implementation": "sm80", "message": "still"}]
    assert record["run_again"] == 3


def test_a_later_run_takes_the_place_of_what_was_left(tmp_path: Path) -> None:
    path = str(tmp_path / "record.json")
    left = {("two", "simt"), ("two", "sm80"), ("three", "simt")}
    verify_record.write(path, [], [("one", "simt", "failed", 9.0, "wrong")], left)
    assert verify_record.unfinished(path) == {("one", "simt"), *left}
    verify_record.amend(
        path, [("two", "simt", "passed", 0.2, ""), ("two", "sm80", "failed", 3.0, "off")]
    )
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    assert (record["passed"], record["failed"], record["not_run"]) == (1, 2, 1)
    assert record["implementations"]["sm80"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert [each["case"] for each in record["failures"]] == ["one", "two"]
    assert record["left"] == {"three": ["simt"]}
    assert record["run_again"] == 0
    assert verify_record.unfinished(path) == {("one", "simt"), ("two", "sm80"), ("three", "simt")}


def test_a_record_of_other_kernels_is_not_amended(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"kernels": "other", "failures": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="other kernels"):
        verify_record.unfinished(str(path))


def test_what_found_no_memory_runs_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    way = verify.Way("cuda", "simt", "torch", 1)
    rounds: list[int] = []

    def run_all(run: Any, next_task: Any, jobs: int, **_: Any) -> Any:
        rounds.append(jobs)
        while (task := next_task()) is not None:
            alone = len(rounds) > 1 or task.name != "wide"
            status = "passed" if alone else "failed"
            message = "" if alone else "OutOfMemoryError: CUDA out of memory"
            yield task, [(task.name, way.name, status, 0.0, message)]

    monkeypatch.setattr(verify, "run_all", run_all)
    tasks = [verify.Task("small", [way]), verify.Task("wide", [way])]
    found = list(verify.results(tasks, 4, 1e9))
    assert rounds == [4, 1]
    assert sum(done for done, _ in found) == 2
    assert [line[:3] for _, lines in found for line in lines] == [
        ("small", "simt", "passed"),
        ("wide", "simt", "passed"),
    ]
