# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What every text file of the project must hold: its licence, and no trace of one machine.

* Source files open with the two SPDX lines (after a #! line, if there is one).
* No absolute path of a home (/home/someone stands for any), work or temporary folder, no relative
  path that leaves the project, no address of a package registry: it stands alone wherever it is.
* No white space at the end of a line, a newline at the end of a file, no file over 1 MiB outside
  examples/data.
Files over 400 lines are listed, not refused: about 150 is the aim. Run by `make check`.
"""

from __future__ import annotations

import re
from pathlib import Path

from source_tree import ROOT, Finding, files, relative, report

SPDX = ("SPDX-FileCopyrightText: fulmen contributors", "SPDX-License-Identifier: Apache-2.0")
SOURCES = (".h", ".hpp", ".cuh", ".cpp", ".cu", ".c", ".py", ".cmake", "CMakeLists.txt", ".sh",
           "Makefile", ".yml", ".toml", ".ini", ".ci/run")  # fmt: skip
BINARY = (".safetensors", ".png", ".npz", ".ico")
LONG_FILE_LINES = 400
LARGE_FILE_BYTES = 1 << 20

_ABSOLUTE = re.compile(r"(?<![\w.$}/~*-])/(home(?!/someone)|root|work|tmp|mnt|Users)(/[\w.-]+|\b)")
_CLIMB = re.compile(r"(?:\.\./)+|(?<![\w./])\.\.(?=[\"'\s)]|$)")
_REGISTRY = re.compile(
    r"\b(?:(?:test\.|files\.)?(?:pypi|pythonhosted)|(?:deb|security)\.debian)\.org\b"
)


def check(root: Path) -> list[Finding]:
    findings = []
    for path in files(root):
        name = relative(path, root)
        if name.endswith(BINARY):
            continue
        if path.stat().st_size > LARGE_FILE_BYTES:
            findings.append(Finding(name, 0, "is over 1 MiB"))
            continue
        text = path.read_text(encoding="utf-8")
        findings += _check_head(name, text)
        if name != "LICENSE":
            findings += _check_lines(name, text)
    return findings


def _check_head(name: str, text: str) -> list[Finding]:
    if not name.endswith(SOURCES) or not text:
        return []
    lines = text.splitlines()
    first = 1 if lines[0].startswith("#!") else 0
    head = lines[first : first + len(SPDX)]
    if len(head) == len(SPDX) and all(tag in line for tag, line in zip(SPDX, head, strict=True)):
        return []
    return [Finding(name, 1, "does not open with the two SPDX lines of the other files")]


def _check_lines(name: str, text: str) -> list[Finding]:
    findings = []
    depth = name.count("/")
    for number, line in enumerate(text.splitlines(), start=1):
        for sentence in _judge(name, depth, line):
            findings.append(Finding(name, number, sentence))
    if text and not text.endswith("\n"):
        findings.append(Finding(name, 0, "does not end with a newline"))
    return findings


def _judge(name: str, depth: int, line: str) -> list[str]:
    said = []
    if line != line.rstrip():
        said.append("white space at the end of the line")
    for match in _ABSOLUTE.finditer(line):
        said.append(f"{match.group()} is a path of one machine")
    for match in _CLIMB.finditer(line):
        if match.group().count("..") > depth:
            said.append(f"{match.group()} leaves the project")
    for match in _REGISTRY.finditer(line):
        said.append(f"{match.group()} is the address of a package registry")
    return said


def long_files(root: Path) -> list[str]:
    """One line for each source file that has outgrown what can be read in one sitting."""
    lines = []
    for path in files(root, SOURCES):
        count = path.read_text(encoding="utf-8").count("\n")
        if count > LONG_FILE_LINES:
            lines.append(f"long file: {relative(path, root)} has {count} lines (aim: about 150)")
    return lines


if __name__ == "__main__":
    print("\n".join(long_files(ROOT)) or f"no source file is over {LONG_FILE_LINES} lines")
    report(check, "Checks licence lines and that no file names one machine.")
