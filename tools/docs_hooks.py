# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What mkdocs adds to the pages at build time, so that nothing is written twice.

* `<!-- generated: c-api -->` in a page becomes the reference of fulmen.h (api_reference.py).
* `<!-- generated: decisions -->` becomes the table of what lies in docs/decisions.
* `<!-- generated: results FILE CASE -->` becomes the table of bench/results/FILE.
* `<!-- generated: records FILE KEY ... -->` becomes these fields of its records, one a line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import api_reference  # noqa: E402  (mkdocs runs hooks without their folder on the path)
import results_table  # noqa: E402

DECISIONS = ROOT / "docs" / "decisions"
RESULTS = re.compile(r"<!-- generated: results (\S+) (\S+) -->")
RECORDS = re.compile(r"<!-- generated: records (\S+) (.+?) -->")


def decisions() -> list[Path]:
    """The numbered decisions, in order; 0000 is the template."""
    found = sorted(DECISIONS.glob("[0-9][0-9][0-9][0-9]-*.md"))
    return [path for path in found if not path.name.startswith("0000")]


def decisions_table() -> str:
    rows = ["| decision | date | status |", "| --- | --- | --- |"]
    for path in decisions():
        text = path.read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        stamp = re.search(r"^Date: ([\d-]+)\. Status: (.+)\.$", text, re.MULTILINE)
        if title is None or stamp is None:
            raise ValueError(f"{path.name} lacks the title or the date line of 0000-template.md")
        rows.append(f"| [{title[1]}]({path.name}) | {stamp[1]} | {stamp[2]} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if "<!-- generated: c-api -->" in markdown:
        header = api_reference.HEADER.read_text(encoding="utf-8")
        markdown = markdown.replace("<!-- generated: c-api -->", api_reference.markdown(header))
    markdown = RESULTS.sub(lambda match: results_table.table(match[1], match[2]), markdown)
    markdown = RECORDS.sub(
        lambda match: results_table.listing(match[1], *match[2].split()), markdown
    )
    return markdown.replace("<!-- generated: decisions -->", decisions_table())
