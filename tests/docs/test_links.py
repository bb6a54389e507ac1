# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Links between files of the repository lead somewhere (mkdocs checks those of the site), and so do
the paths that pages name.
"""

import re
from pathlib import Path

import pytest
from markdown_pages import DOCS, ROOT, links, pages

from source_tree import files

FOLDERS = ("bench", "examples", "src", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.glob("design/*.md"),
    *DOCS.glob("decisions/*.md"),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
NAMES = ["/" + path.relative_to(ROOT).as_posix() for path in files(ROOT)]
SITE = [DOCS / language / page for language in ("en", "zh") for page in pages(language)]


@pytest.mark.parametrize("page", PAGES + SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    missing = [
        target
        for target in links(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES + SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:bench|cmake|docs|examples|include|python|src|tests|tools)/[\w./*-]*)`",
        page.read_text(encoding="utf-8"),
    )
    assert [path for path in named if not any(ROOT.glob(path))] == []


@pytest.mark.parametrize("page", PAGES + SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_alone_exist(page: Path) -> None:
    """`mask.cuh`, `arrays.def` or `gpu/params.cpp`, wherever they lie."""
    suffixes = "cuh|hpp|h|cpp|py|def|sh|txt|cmake|md|toml|ini|gdb"
    named = re.findall(rf"`((?:[\w-]+/)*[\w-]+\.(?:{suffixes}))`", page.read_text(encoding="utf-8"))
    assert [file for file in named if not any(name.endswith(f"/{file}") for name in NAMES)] == []


@pytest.mark.parametrize("page", SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_of_the_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = set(re.findall(r"\btests/(?:\w+/)*(\w+_test)\b|`(\w+_test)`", text))
    lists = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("CMakeLists.txt"))
    made = set(re.findall(r"add_executable\((\w+_test)\b", lists))
    made |= {f"{folder}_test" for folder in re.findall(r"fulmen_add_test\((\w+)", lists)}
    made |= {Path(name).stem for name in NAMES if name.startswith("/tests/")}  # or a file's
    assert {one or other for one, other in named} <= made
    for pattern in re.findall(r"ctest --preset \w+ -R '([\w|]+)'", text):
        tests = made | set(re.findall(r"add_executable\((\w+)", lists))
        assert all(any(word in test for test in tests) for word in pattern.split("|")), pattern


def test_the_readme_links_to_what_newcomers_look_for() -> None:
    targets = links((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"CONTRIBUTING.md", "LICENSE", "SECURITY.md", "README.zh.md"} <= set(targets)
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
