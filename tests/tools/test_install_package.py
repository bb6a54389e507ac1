# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What `make run` says while it builds, and what it shows of a build that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import install_package

LINES = [
    "Processing /src/fulmen\n",
    "  Installing build dependencies: started\n",
    "  Collecting packaging>=23.2\n",
    "  Installing collected packages: packaging\n",
    "  Preparing metadata (pyproject.toml): started\n",
    "Collecting numpy>=1.24 (from fulmen==0.1.0)\n",
    "  Building wheel for fulmen (pyproject.toml): started\n",
    "  *** Configuring CMake...\n",
    "  [0/2] Re-checking globbed directories...\n",
    *(f"  [{n}/20] Building CXX object a.dir/src/{n}.cpp.o\n" for n in range(1, 21)),
    "Installing collected packages: numpy, fulmen\n",
]


def pip(*lines: str, code: int) -> Any:
    def run(command: list[str], see: Any) -> int:
        for line in lines:
            see(line)
        return code

    return run


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "logs" / "install.log"
    monkeypatch.setattr(install_package, "ROOT", tmp_path)
    monkeypatch.setattr(install_package, "LOG", path)
    return path


def test_each_step_once_and_each_tenth_of_the_files(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install_package, "run", pip(*LINES, code=0))
    assert install_package.main() == 0
    said = capsys.readouterr().out.splitlines()
    steps = [line for line in said if line.startswith("[")]
    assert [line[:5] for line in steps] == [f"[{n}/6]" for n in range(1, 7)]
    files = [line.split(",")[0].strip() for line in said if " of 20 files" in line]
    assert files == ["1 of 20 files", *(f"{n} of 20 files" for n in range(2, 21, 2))]
    assert said[-1].startswith("installed in ")
    assert log.read_text() == "".join(LINES)


def test_a_build_that_fails_shows_why(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [*LINES[:12], "a.cpp:3: error: planted\n"]
    monkeypatch.setattr(install_package, "run", pip(*broken, code=1))
    assert install_package.main() == 1
    said = capsys.readouterr().out
    assert "a.cpp:3: error: planted" in said
    assert said.endswith(f"all that it printed is in {log}\n")
