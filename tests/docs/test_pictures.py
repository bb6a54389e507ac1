# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Pictures: each is shown with words for those who do not see it, and none has texts that touch.

That the files are what tools/pictures draws is a part of the step `docs` (`--check`).
"""

import re
from pathlib import Path

import pytest
from canvas import Box, Picture
from markdown_pages import DOCS, pages

from docs_site import with_figures

SHOWN = re.compile(r"^!\[([^\]]*)\]\([^)]*pictures/(\w+)\.svg\)\n\n(\*[^*\n]+\*)?$", re.MULTILINE)
LANGUAGES = ("en", "zh")


def files(language: str) -> set[str]:
    return {path.stem for path in (DOCS / language / "pictures").glob("*.svg")}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_picture_is_shown_with_a_description_and_a_caption(language: str) -> None:
    shown = [found for text in pages(language).values() for found in SHOWN.findall(text)]
    assert {name for _, name, _ in shown} == files(language)
    for description, name, caption in shown:
        assert len(description) > 25, name
        assert caption, name
        assert '"' not in description


def test_both_languages_show_the_same_pictures_in_the_same_order() -> None:
    for page, text in pages("en").items():
        names = [name for _, name, _ in SHOWN.findall(text)]
        assert names == [name for _, name, _ in SHOWN.findall(pages("zh")[page])]
    assert files("en") == files("zh")


@pytest.mark.parametrize("language", LANGUAGES)
def test_pictures_have_colours_for_light_and_dark(language: str) -> None:
    for path in (DOCS / language / "pictures").glob("*.svg"):
        light, dark = path.read_text(encoding="utf-8").split("@media (prefers-color-scheme:dark)")
        named = set(re.findall(r"^\.picture \.([\w-]+) {.*(?:fill|stroke): #", light, re.MULTILINE))
        assert named <= set(re.findall(r"\.picture \.([\w-]+) {", dark.split("</style>")[0])), path
        assert len(path.read_bytes()) < 40_000, path
        # More digits than an eye sees would differ from machine to machine.
        assert not re.search(r'(?:\bd|\bx|\by|width|height)="[^"]*\.\d{3}', light + dark), path


def test_texts_that_touch_and_texts_that_leave_the_picture_are_refused() -> None:
    picture = Picture("en", 100, "a test")
    picture.text((20, 40), "here stands something")
    with pytest.raises(ValueError, match="'and here' meets 'here stands something'"):
        picture.text((60, 44), "and here")
    with pytest.raises(ValueError, match="leaves the picture"):
        picture.text((700, 80), "too long")
    with pytest.raises(ValueError, match="in a box of 30"):
        picture.label(Box(20, 60, 30, 20), "too wide a label")


def test_a_picture_becomes_a_part_of_its_page(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(
        '<svg role="img"><style>@media (prefers-color-scheme:dark) {}</style></svg>'
    )
    html = '<p><img alt="words" src="../pictures/a.svg" /></p>\n<p><em>said</em></p><p>more</p>'
    page = with_figures(html, tmp_path)
    assert 'aria-label="words"' in page
    assert '<style>[data-md-color-scheme="slate"] {}</style>' in page
    assert page.endswith("<figcaption>said</figcaption>\n</figure><p>more</p>")
