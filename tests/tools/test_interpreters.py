# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""interpreters takes only programs that answer as CPython, and the two ends of what it found."""

import sys
from pathlib import Path

import pytest

import interpreters


def program(folder: Path, name: str, prints: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{prints}\n")
    path.chmod(0o755)


@pytest.fixture
def three_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program(tmp_path, "python3.9", "echo '[\"CPython\", 3, 9, 1]'")
    program(tmp_path, "python3.10", "exit 127  # a shim without a version behind it")
    program(tmp_path, "python3.11", "echo '[\"CPython\", 3, 11, 2]'")
    program(tmp_path, "python3.12", "echo '[\"PyPy\", 3, 12, 0]'")
    program(tmp_path, "python3.13", "echo '[\"CPython\", 3, 13, 0]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    return tmp_path


def test_only_what_answers_as_cpython_counts(three_pythons: Path) -> None:
    assert list(interpreters.found()) == [(3, 9), (3, 11), (3, 13)]


def test_the_two_ends_from_the_minimum_on(three_pythons: Path) -> None:
    assert list(interpreters.oldest_and_newest((3, 9))) == [(3, 9), (3, 13)]
    assert list(interpreters.oldest_and_newest((3, 10))) == [(3, 11), (3, 13)]
    assert list(interpreters.oldest_and_newest((3, 12))) == [(3, 13)]
    assert interpreters.oldest_and_newest((3, 14)) == {}


def test_this_interpreters_version_is_read() -> None:
    assert interpreters._version(Path(sys.executable)) == sys.version_info[:2]
