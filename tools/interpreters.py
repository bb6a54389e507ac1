# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which CPython versions are on this machine: the wheel is tried on the oldest and the newest.

Looks for python3.N on PATH and among pyenv's versions. A machine that has one only (a bare Debian)
tests that one, and `make test` says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

MINORS = range(9, 30)
_ASK = (
    "import ensurepip, venv, json, platform, sys;"
    "print(json.dumps([platform.python_implementation(), *sys.version_info[:3]]))"
)


def found() -> dict[tuple[int, int], Path]:
    """CPython 3.N that can make a virtual environment -> its program, oldest first."""
    programs: dict[tuple[int, int], Path] = {}
    for candidate in _candidates():
        version = _version(candidate)
        if version is not None:
            programs.setdefault(version, candidate)
    return dict(sorted(programs.items()))


def oldest_and_newest(minimum: tuple[int, int]) -> dict[tuple[int, int], Path]:
    """The two ends of `found` from the package's minimum on; one entry if there is only one."""
    fit = {version: program for version, program in found().items() if version >= minimum}
    ends = [*fit][:1] + [*fit][-1:]
    return {version: fit[version] for version in ends}


def _candidates() -> list[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [f"python3.{minor}" for minor in MINORS]
    installed = [path for name in names for path in sorted(pyenv.glob(f"3.*/bin/{name}"))]
    on_path = [Path(program) for name in names if (program := shutil.which(name))]
    return installed + on_path


def _version(program: Path) -> tuple[int, int] | None:
    """Major and minor of a CPython that starts; None for anything else."""
    try:
        done = subprocess.run(
            [program, "-c", _ASK], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    implementation, major, minor, _ = json.loads(done.stdout)
    return (major, minor) if implementation == "CPython" else None


if __name__ == "__main__":
    for version, program in found().items():
        print("{}.{}".format(*version), program)
