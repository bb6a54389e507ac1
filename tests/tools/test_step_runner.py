# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""step_runner stops at the first failure, naming the step; ends with times when all pass."""

import sys
import time
from pathlib import Path

import pytest

import run_steps
from step_runner import Runner, Step, StepError, read_budget, run_all, write_budget


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
        Step("never", "not reached", later.append, after=("bad",)),
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


def test_steps_run_beside_each_other_and_after_what_they_need(tmp_path: Path) -> None:
    order: list[str] = []

    def slow(runner: Runner) -> None:
        while "b" not in order:  # runs at the same time, or this would wait for ever
            time.sleep(0.01)
        order.append("a")

    steps = [
        Step("a", "slow", slow),
        Step("c", "needs a", lambda runner: order.append("c"), after=("a",)),
        Step("b", "quick", lambda runner: order.append("b")),
    ]
    assert run_all("make test", steps, tmp_path) == 0
    assert order == ["b", "a", "c"]


def test_a_failure_stops_what_runs_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(runner: Runner) -> None:
        raise StepError("no")

    steps = [
        Step("long", "a minute", lambda runner: runner.run(python("import time; time.sleep(60)"))),
        Step("bad", "fails", fails),
    ]
    began = time.monotonic()
    assert run_all("make test", steps, tmp_path) == 1
    assert time.monotonic() - began < 30
    out = capsys.readouterr().out
    assert out.count("FAILED") == 1
    assert "FAILED in step 'bad'" in out


def test_an_error_of_the_step_itself_fails_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_all("t", [Step("bug", "divides", lambda runner: runner.say(str(1 // 0)))], tmp_path)
        == 1
    )
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_step_over_its_budget_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    steps = [Step("busy", "computes", lambda runner: runner.run(python(busy)))]
    assert run_all("t", steps, tmp_path, {"busy": 30}) == 0
    assert run_all("t", steps, tmp_path, {"busy": 0.1}) == 1
    assert "FAILED: step 'busy' took" in capsys.readouterr().out


def test_a_budget_is_written_from_what_steps_took(tmp_path: Path) -> None:
    rows = tmp_path / "budget.txt"
    rows.write_text("# seconds\na 100\nb 7\n")
    write_budget(rows, {"a": 10.0})
    assert rows.read_text() == "# seconds\na 15\nb 7\n"


def test_the_budget_names_every_step() -> None:
    names = {step.name for step in run_steps.PLANS["test"]}
    assert read_budget(run_steps.BUDGET).keys() == names


@pytest.mark.parametrize("plan", run_steps.PLANS)
def test_a_step_needs_only_steps_of_its_plan_that_come_before(plan: str) -> None:
    before: set[str] = set()
    for step in run_steps.PLANS[plan]:
        assert before >= set(step.after), step.name
        before.add(step.name)
