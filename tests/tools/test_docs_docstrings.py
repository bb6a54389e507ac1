# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Docstrings reach the reference as Markdown: doctests fenced, powers not taken for bold type."""

from docs_docstrings import as_markdown


def test_doctests_are_fenced() -> None:
    text = "Adds.\n\n>>> add(1, 2)\n3\n\nMore.\n\n>>> x = 2**3"
    fenced = "Adds.\n\n```pycon\n>>> add(1, 2)\n3\n```\n\nMore.\n\n```pycon\n>>> x = 2**3\n```"
    assert as_markdown(text) == fenced


def test_powers_are_escaped_and_bold_type_is_not() -> None:
    assert as_markdown("below 2**64, not 2**32") == r"below 2\*\*64, not 2\*\*32"
    assert as_markdown("this is **bold** type") == "this is **bold** type"
