# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The tree in Architecture names the folders that there are, on both sides of a kernel family."""

import re
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks, pages

import check_layers

PAGE = "contributing/architecture.md"


def named_folders(text: str) -> set[str]:
    """Folders of src that the tree names; `FAMILY/` stands for itself."""
    tree = next(block.code for block in blocks(text, "text") if block.code.startswith("include/"))
    found, parent = set(), ""
    for line in tree.splitlines():
        folder = re.match(r"(  )?([\w/]+/)  ", line)
        if folder is None:
            continue
        if not folder[1]:
            parent = folder[2]
        if parent.startswith("src/"):
            found.add((parent if folder[1] else "") + folder[2])
    return found


def families(text: str) -> set[str]:
    """The names that the paragraph below the tree gives."""
    paragraph = next(line for line in re.split(r"\n\n", text) if re.match("(A )?FAMILY", line))
    return set(re.findall(r"`(\w+)`", paragraph))


def folders(path: Path) -> set[str]:
    return {child.name for child in path.iterdir() if any(child.rglob("*.*"))
            if child.is_dir() and child.name != "__pycache__"}  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_folder_of_src_is_in_the_tree_and_none_that_is_not_there(language: str) -> None:
    text = pages(language)[PAGE]
    expected = {f"src/{name}/" for name in folders(ROOT / "src")}
    for side in ("gpu", "kernels"):
        own = folders(ROOT / "src" / side)
        assert own & families(text)
        expected |= {f"src/{side}/{name}/" for name in own - families(text)}
        expected.add(f"src/{side}/FAMILY/")
    assert named_folders(text) == expected


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_layers_are_those_that_are_checked(language: str) -> None:
    rule = [line.strip() for line in str(check_layers.__doc__).split("\n\n")[1].splitlines()][:4]
    shown = [block.code for block in blocks(pages(language)[PAGE], "text")]
    assert any([line.strip() for line in code.splitlines()][:4] == rule for code in shown)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_families_are_the_folders_of_kernels_that_are_kernels(language: str) -> None:
    kernels = ROOT / "src" / "kernels"
    own = {name for name in folders(kernels) if name not in ("attention", "common", "ptx")}
    assert families(pages(language)[PAGE]) == own
