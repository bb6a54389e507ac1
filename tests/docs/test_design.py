# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The index of docs/design finds every decision by its number; links name headings that exist."""

import re
from pathlib import Path

import pytest
from markdown_pages import DOCS, ROOT, without_code

DESIGN = DOCS / "design"
INDEX = (DESIGN / "README.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (\d+) \| .*? \| (.+) \|$", INDEX, re.MULTILINE))
DECISIONS = {
    int(path.name[:4]): path for path in sorted((DOCS / "decisions").glob("[0-9][0-9][0-9][0-9]-*"))
}
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as code hosts and the site make them; and of what the site makes
    from docstrings, by its name.
    """
    text = without_code_fences(page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    return made | {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles
    }


def without_code_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_index_names_every_number_in_order() -> None:
    numbers = [int(number) for number in ROWS]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 45


def test_every_decision_is_in_the_index_and_every_number_leads_somewhere() -> None:
    assert {number for number in DECISIONS if number} <= {int(number) for number in ROWS}
    for number, where in ROWS.items():
        assert "](" in where or "never given" in where, number
        path = DECISIONS.get(int(number))
        assert path is None or f"decisions/{path.name}" in where, number


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_name_headings_that_exist(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    missing = [
        f"{target}#{anchor}"
        for target, anchor in re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", text)
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []
