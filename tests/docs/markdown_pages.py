# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The parts of a Markdown page that the tests of this folder compare and compile."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    code: str


def blocks(text: str, language: str = "") -> list[Block]:
    """The fenced code blocks of a page, in order; of one language if it is named."""
    found = [Block(*match.groups()) for match in _FENCE.finditer(text)]
    return [block for block in found if language in ("", block.language)]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def without_generated(text: str) -> str:
    """A page without what tools/docs_tables.py wrote into it."""
    return re.sub(r"<!-- begin generated: .*?<!-- end generated -->", "", text, flags=re.DOTALL)


def headings(text: str) -> list[int]:
    """The levels of the headings, in order."""
    return [len(match) for match in re.findall(r"^(#+) ", _FENCE.sub("", text), re.MULTILINE)]


def links(text: str) -> list[str]:
    """The targets of links to other files of the project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [target.split("#")[0] for target in targets if not re.match(r"https?:|#", target)]


def pages(language: str) -> dict[str, str]:
    """Every page of a language: path below docs/LANGUAGE -> text."""
    folder = DOCS / language
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.md"))
    }
