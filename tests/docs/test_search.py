# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The index of the site's search: a Chinese word of two characters is a word in it, and a decision
does not stand before a page that explains.
"""

import json
import re
from typing import Any

import pytest
from markdown_pages import ROOT

# A search finds a word, or the beginning of one; a page whose title has it comes first.
WORDS = {
    "掩码": "zh/concepts/masks/",
    "窗口": "zh/concepts/masks/",
    "反向": "zh/concepts/flash-attention/",
    "张量": "zh/concepts/precision/",
    "误差": "zh/concepts/numerics/",
    "布局": "zh/concepts/attention/",
    "迁移": "zh/migration/",
    "性能": "zh/concepts/performance/",
    "内核": "zh/contributing/adding/",
}


@pytest.fixture(scope="module")
def index() -> dict[str, Any]:
    path = ROOT / "build" / "site" / "search" / "search_index.json"
    assert path.is_file(), f"{path} is missing: `make docs` builds the site"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def words(index: dict[str, Any], entry: dict[str, Any]) -> set[str]:
    text = re.sub(r"<[^>]*>", " ", f"{entry['title']} {entry['text']}")
    return set(re.split(index["config"]["separator"], text))


@pytest.mark.parametrize("word", WORDS)
def test_a_chinese_word_finds_its_page(index: dict[str, Any], word: str) -> None:
    found = {e["location"].split("#")[0] for e in index["docs"] if word in words(index, e)}
    assert WORDS[word] in found


def test_decisions_come_last(index: dict[str, Any]) -> None:
    boosts: dict[str, set[float]] = {}
    for entry in index["docs"]:
        folder = entry["location"].removeprefix("zh/").split("/")[0]
        boosts.setdefault(folder, set()).add(entry.get("boost", 1.0))
    assert max(boosts.pop("decisions")) < min(boosts.pop("design")) < 1
    assert set.union(*boosts.values()) == {1.0}
