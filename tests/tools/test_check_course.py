# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_course.py names solved exercises, solutions that fail and kernels that are too long."""

from pathlib import Path
from typing import Any

import pytest

import check_course


@pytest.fixture
def chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chapter 1 with one exercise."""
    monkeypatch.setattr(check_course.learn, "chapters", lambda: {1: tmp_path})
    monkeypatch.setattr(check_course.learn, "exercises_of", lambda number: range(1, 2))
    return tmp_path


def answers(monkeypatch: pytest.MonkeyPatch, as_it_stands: list[str], solution: list[str]) -> None:
    def run(number: int, exercise: int, device: Any, output: Any, solved: bool) -> list[str]:
        return solution if solved else as_it_stands

    monkeypatch.setattr(check_course.learn, "run_exercise", run)


def found(device: Any = None, output: Any = None) -> list[str]:
    return check_course.wrong_exercises(1, device, output)


def test_an_exercise_fails_and_its_solution_passes(
    chapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ["not yet"], [])
    assert found() == []
    answers(monkeypatch, [], [])
    assert found() == ["exercise 1.1 is solved as it stands"]
    answers(monkeypatch, ["not yet"], ["o is wrong"])
    assert found() == ["the solution of 1.1: o is wrong"]


def test_a_kernel_that_is_too_long_is_named(chapter: Path) -> None:
    (chapter / "short.cu").write_text("//\n" * check_course.MOST_LINES)
    (chapter / "long.cu").write_text("//\n" * (check_course.MOST_LINES + 1))
    assert check_course.long_kernels(1) == ["long.cu has 121 lines; 120 are allowed"]
