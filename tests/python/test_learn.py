# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen learn: what it says where the course is not, and of calls that it cannot follow.

The chapters themselves are run by tools/check_course.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def learn(*words: str, where: Path = ROOT, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "fulmen", "learn", *words], cwd=where,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_a_checkout_it_says_where_the_course_is(tmp_path: Path) -> None:
    words = "import sys; sys.prefix = sys.argv.pop(1); from fulmen.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", f"{words.replace('main()', 'sys.exit(main())')}", str(tmp_path),
         "learn", "1"], cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "fulmen learn: the course is not in the package: clone the project's repository, call "
        "`make run` and `make course` there, and `.venv/bin/fulmen learn` in it\n"
    )


def test_chapters_are_listed_with_their_pages(tmp_path: Path) -> None:
    done = learn("--json", where=ROOT / "course")
    assert done.returncode == 0, done.stderr
    chapters = json.loads(done.stdout)
    assert [x["chapter"] for x in chapters] == list(range(1, len(chapters) + 1))
    for x in chapters:
        assert x["exercises"] >= 2
        assert (ROOT / x["page"]).read_text(encoding="utf-8").startswith(f"# {x['chapter']}. ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["99"], "there is no chapter 99; there are 1, 2, 3"),
        (["1", "--exercise", "99"], "chapter 1 has exercises 1 to 2, and no 99"),
        (["--exercise", "1"], "--exercise is given without a chapter"),
        (["1", "--solution"], "--solution is given without --exercise"),
        (["1", "--exercise", "1", "--on", "gpu"], "exercises are tested on the emulator"),
        (["1", "--causal"], "--causal is for fulmen learn compare"),
        (["--shape", "8", "16", "1"], "--shape is for fulmen learn compare"),
        (["compare", "--exercise", "1"], "--exercise is of a chapter, and compare is none"),
        (["compare", "--on", "emulator"], "compare takes times: on a GPU where one is"),
        (["compare", "--shape", "8", "0", "1"], "'0', where a whole number of at least 1"),
    ],
)
def test_what_it_cannot_follow_is_one_sentence(words: list[str], sentence: str) -> None:
    emulator = ROOT / "build" / "release" / "tests/emulator/gpu/libfulmen_emulated_gpu.so"
    done = learn(*words, FULMEN_EMULATOR=str(emulator))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_emulator_that_is_not_built_is_one_sentence(tmp_path: Path) -> None:
    done = learn("1", "--on", "emulator", FULMEN_EMULATOR=str(tmp_path / "none.so"))
    assert done.returncode == 2
    assert done.stderr == "fulmen learn: the emulator is not built: run `make course` once\n"
