# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Generated parts of pages: written between their comments, named where they are stale."""

import pytest

import docs_tables

PART = "<!-- begin generated: decisions -->\n{}<!-- end generated -->"
PAGE = f"# Title\n\nBefore.\n\n{PART}\n\nAfter.\n"


def test_a_part_is_written_and_the_rest_stays() -> None:
    page = docs_tables.written(PAGE.format("of yesterday\n"))
    assert docs_tables.decisions_table() in page
    assert "of yesterday" not in page
    assert docs_tables.without_parts(page) == "# Title\n\nBefore.\n\n\n\nAfter.\n"


def test_writing_twice_changes_nothing() -> None:
    page = docs_tables.written(PAGE.format(""))
    assert docs_tables.written(page) == page
    assert docs_tables.stale_parts(page) == []


@pytest.mark.parametrize("text", ["", "of yesterday\n", "| decision |\n"])
def test_a_stale_part_is_named(text: str) -> None:
    assert docs_tables.stale_parts(PAGE.format(text)) == ["decisions"]


def test_what_nothing_generates_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing generates 'weather'"):
        docs_tables.text_of("weather")


def test_a_region_of_a_file_is_quoted_in_a_fence() -> None:
    code = docs_tables.quotation("examples/huggingface/swap.py:swap", "python")
    assert code.startswith("```python\n")
    assert code.endswith("\n```")
    assert "--8<--" not in code


def test_a_region_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="no region weather"):
        docs_tables.quotation("examples/huggingface/swap.py:weather", "")
