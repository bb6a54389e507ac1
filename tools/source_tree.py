# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The files of the project, and how a check reports what it finds in them.

Used by every check under tools/. A check is a function from a root directory to findings; `report`
turns it into a program that prints one line per finding and exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Folders that tools write into; only asked for where git is not there to say what is ignored.
_GENERATED = {".git", ".venv", "build", "dist", "site", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where; line 0 stands for the whole file."""

    path: str
    line: int
    sentence: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.sentence}"


def files(root: Path, suffixes: Iterable[str] = ()) -> list[Path]:
    """The project's own files below root, sorted; with suffixes, those that end in one."""
    wanted = tuple(suffixes)
    return sorted(p for p in _all_files(root) if not wanted or p.name.endswith(wanted))


def _all_files(root: Path) -> Iterator[Path]:
    listed = None
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, check=False,
        )  # fmt: skip
    if listed is not None and listed.returncode == 0:
        paths = (root / name for name in listed.stdout.decode().split("\0") if name)
    else:
        paths = (p for p in root.rglob("*") if not _GENERATED & set(p.relative_to(root).parts))
    return (p for p in paths if p.is_file())


def relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def report(check: Callable[[Path], list[Finding]], description: str) -> None:
    """The command line of a check: `python tools/check_x.py [--root DIR]`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    findings = check(parser.parse_args().root.resolve())
    for finding in findings:
        print(finding)
    print(f"{Path(sys.argv[0]).stem}: {len(findings)} finding(s)")
    sys.exit(1 if findings else 0)
