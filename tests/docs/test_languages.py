# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""English and Chinese say the same: equal pages, equal code, equal structure."""

import re

import pytest
from markdown_pages import ROOT, blocks, headings, links, pages, without_code, without_generated

ENGLISH, CHINESE = pages("en"), pages("zh")


def test_both_languages_have_the_same_pages() -> None:
    assert list(ENGLISH) == list(CHINESE)
    assert len(ENGLISH) > 10


@pytest.mark.parametrize("page", ENGLISH)
def test_code_blocks_are_equal(page: str) -> None:
    assert blocks(CHINESE[page]) == blocks(ENGLISH[page])


@pytest.mark.parametrize("page", ENGLISH)
def test_headings_and_links_are_parallel(page: str) -> None:
    assert headings(CHINESE[page]) == headings(ENGLISH[page])
    assert sorted(links(CHINESE[page])) == sorted(links(ENGLISH[page]))


@pytest.mark.parametrize("page", ENGLISH)
def test_chinese_pages_are_chinese(page: str) -> None:
    """A page that was only copied has no Chinese prose: at least one character in five words."""
    prose = without_code(without_generated(CHINESE[page]))
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > len(re.findall(r"[A-Za-z]+", prose)) / 5


def test_the_two_readmes_hold_the_same_code() -> None:
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert blocks(chinese) == blocks(english)
    assert headings(chinese) == headings(english)
