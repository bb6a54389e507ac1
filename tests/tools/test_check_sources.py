# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_sources sees what may not stand in a file, and leaves ordinary text alone."""

import pytest
from small_tree import ROOT, SPDX, WriteTree

import check_sources

FINE = {
    "src/core/a.cpp": SPDX + "// rows / heads; a/b/home/c; $HOME/x; /home/someone/x\n",
    "tools/run.sh": "#!/usr/bin/env bash\n" + SPDX.replace("//", "#") + "cd ../\n",
    "docs/en/guide/page.md": "See [home](../../en/index.md); a folder/.. is fine here.\n",
    "README.md": "pip install fulmen, then https://arxiv.org/abs/2205.14135\n",
}


def test_ordinary_text_passes(write_tree: WriteTree) -> None:
    assert check_sources.check(write_tree(FINE)) == []


def test_this_project_passes() -> None:
    assert [str(finding) for finding in check_sources.check(ROOT)] == []


# Built from pieces, so that this file holds none of them itself.
SLASH = "/"
VIOLATIONS = {
    "home folder": ("README.md", SLASH + "home/me/x", "path of one machine"),
    "root's folder": ("README.md", "see " + SLASH + "root/.cache", "path of one machine"),
    "work folder": ("README.md", f"`{SLASH}work{SLASH}main`", "path of one machine"),
    "temporary folder": ("README.md", "cd " + SLASH + "tmp/build", "path of one machine"),
    "climbs out": ("README.md", "see .." + SLASH + "other/x", "leaves the project"),
    "climbs out of a folder": (
        "docs/en/guide/page.md",
        ".." + (SLASH + "..") * 3 + SLASH,
        "leaves",
    ),
    "registry": ("README.md", "from py" + "pi.org", "package registry"),
    "white space": ("README.md", "end ", "white space"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_seen(name: str, write_tree: WriteTree) -> None:
    path, line, said = VIOLATIONS[name]
    found = check_sources.check(write_tree({**FINE, path: FINE[path] + line + "\n"}))
    assert [(finding.path, finding.line) for finding in found] == [(path, 2)]
    assert said in found[0].sentence


@pytest.mark.parametrize("text", ["int x;\n", SPDX.splitlines()[0] + "\n", "\n" + SPDX])
def test_missing_licence_lines_are_seen(text: str, write_tree: WriteTree) -> None:
    found = check_sources.check(write_tree({**FINE, "src/core/b.cpp": text}))
    assert [finding.path for finding in found] == ["src/core/b.cpp"]
    assert "SPDX" in found[0].sentence


def test_missing_last_newline_and_large_files_are_seen(write_tree: WriteTree) -> None:
    large = "x" * (check_sources.LARGE_FILE_BYTES + 1)
    found = check_sources.check(write_tree({**FINE, "a.md": "no newline", "b.md": large}))
    assert [str(finding) for finding in found] == [
        "a.md: does not end with a newline",
        "b.md: is over 1 MiB",
    ]


def test_long_files_are_listed(write_tree: WriteTree) -> None:
    lines = check_sources.LONG_FILE_LINES
    root = write_tree({"a.py": "\n" * lines, "b.py": "\n" * (lines + 1)})
    assert len(check_sources.long_files(root)) == 1
