# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""step_runner stops at the first failure, naming the step; ends with times when all pass."""

import sys
from pathlib import Path

import pytest

from step_runner import Runner, Step, run_all


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_all_steps_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def quiet(runner: Runner) -> None:
        assert runner.run(python("print('unseen')")) == "unseen\n"

    def shown(runner: Runner) -> None:
        runner.run(python("print('3 passed, 0 failed')"), show=True)

    assert (
        run_all("make test", [Step("a", "first", quiet), Step("b", "second", shown)], tmp_path) == 0
    )
    out = capsys.readouterr().out
    assert "\n3 passed, 0 failed\n" in out
    assert "unseen" not in out
    assert "make test: every step passed" in out
    assert "unseen" in (tmp_path / "build/logs/a.log").read_text()


def test_a_failing_step_ends_the_run_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later: list[Runner] = []

    def fails(runner: Runner) -> None:
        runner.run(python("print('why'); exit(3)"))

    steps = [
        Step("bad", "it fails", fails),
        Step("never", "not reached", later.append),
    ]
    assert run_all("make test", steps, tmp_path) == 1
    out = capsys.readouterr().out
    assert "FAILED in step 'bad'" in out
    assert "exit code 3" in out
    assert "why" in out
    assert "every step passed" not in out
    assert later == []


def test_variables_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_OUTER", "outer")
    said = []

    def action(runner: Runner) -> None:
        code = "import os; print(os.environ['FULMEN_OUTER'], os.environ['FULMEN_INNER'])"
        said.append(runner.run(python(code), env={"FULMEN_INNER": "inner"}))

    assert run_all("make test", [Step("env", "environment", action)], tmp_path) == 0
    assert said == ["outer inner\n"]
