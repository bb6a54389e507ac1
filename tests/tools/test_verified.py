# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Records: of the cases on a card, of planted faults; the note where kernels have changed."""

import json
from pathlib import Path

import pytest

import verified

RECORD = {
    "commit": "1234567", "kernels": "", "date": "2026-01-02", "cards": ["H200"], "cases": "all",
    "not_run": 0, "passed": 7802, "failed": 0, "skipped": 12, "failures": [],
}  # fmt: skip


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(**changes) -> str:
        (tmp_path / "record.json").write_text(json.dumps({**RECORD, **changes}), encoding="utf-8")
        return "record.json"

    monkeypatch.setattr(verified, "ROOT", tmp_path)
    return write


def test_the_sentence_has_the_counts(record) -> None:
    said = verified.sentence(record(), "en")
    assert "commit 1234567, 2026-01-02): 7,802 passed, 0 failed, 12 were refused" in said
    assert "an H200" in said
    assert "7,802 次通过，0 次失败，12 次" in verified.sentence(record(), "zh")


def test_planted_faults_that_passed_are_named(record) -> None:
    name = record(planted=3, found=3, passed=[], unjudged=[])
    assert verified.planted(name, "en").endswith("3 faults planted, 3 found.")
    name = record(planted=3, found=1, passed=["x"], unjudged=["y"])
    assert "1 found; no test sees `x`; there was no time for `y`." in verified.planted(name, "en")
    assert "发现 1 个；没有测试发现 `x`；`y` 没有" in verified.planted(name, "zh")


def test_planted_faults_found_on_earlier_kernels_are_counted(record) -> None:
    earlier = {"commit": "7654321", "found": 2, "changed": ["a/b.cuh"]}
    name = record(planted=3, found=3, passed=[], unjudged=[], earlier=[earlier])
    said = "3 found, 2 of them on the kernels of commit 7654321, of whose files `a/b.cuh` changed"
    assert said in verified.planted(name, "en")
    assert "发现 3 个，其中 2 个是在提交 7654321 的内核上发现的" in verified.planted(name, "zh")


def test_failures_and_what_was_not_run_are_named(record) -> None:
    failure = {"case": "u01_x", "implementation": "simt", "message": "o differs"}
    name = record(failed=1, failures=[failure], not_run=3, cases=["bug", "u0*"])
    said = verified.sentence(name, "en")
    assert "1 failed: `u01_x` (simt)" in said
    assert "bug u0* but 3 for which there was no time" in said


def test_what_found_no_memory_is_counted_apart(record) -> None:
    wrong = {"case": "u01_x", "implementation": "simt", "message": "o differs"}
    crowded = {"case": "u02_x", "implementation": "simt", "message": "OutOfMemoryError: none"}
    said = verified.sentence(record(failed=2, failures=[wrong, crowded]), "en")
    assert "1 failed: `u01_x` (simt), 12 were refused by name; 1 found no memory" in said


def test_a_record_of_other_kernels_is_noted(record, tmp_path: Path) -> None:
    kernel = tmp_path / "src" / "kernels" / "a.cuh"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("text", encoding="utf-8")
    now = verified.digest_of_kernels(tmp_path)
    assert verified.note(record(kernels=now)) == ""
    kernel.write_text("other text", encoding="utf-8")
    assert verified.digest_of_kernels(tmp_path) != now
    assert "commit 1234567, not of these" in verified.note(record(kernels=now))
