# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.h as a page: its sections become headings, its comments text, its declarations code.

The header stays the only source: docs_tables.py writes the result of `markdown` into the pages
docs/*/reference/c.md and says where it is stale. What is relied on is the header's own form:
sections are comments between two rules of dashes whose first line is "N  Title"; a comment that
stands before a declaration, without an empty line between, belongs to it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from source_tree import ROOT

HEADER = ROOT / "include" / "fulmen" / "fulmen.h"

_SECTION = re.compile(r"/\* -{20,}\n(.*?)-{20,} \*/\n", re.DOTALL)
_COMMENT = re.compile(r"/\*(.*?)\*/\n?", re.DOTALL)
_FUNCTION = re.compile(r"(?:FULMEN_API|static inline)[^;{]*?\b(fulmen_\w+)\s*\(")
_TYPEDEF = re.compile(r"typedef\s+(?:enum|struct)\s+(fulmen_\w+)|typedef\s+void\s+\(\*(fulmen_\w+)")


def markdown(text: str, heading_level: int = 2) -> str:
    """The page's text, from the contents of the header."""
    pieces = _SECTION.split(text)[1:]
    parts = []
    for comment, body in zip(pieces[::2], pieces[1::2], strict=True):
        number, title, prose = _section(comment)
        parts.append(f"{'#' * heading_level} {number}. {title}\n")
        if prose:
            parts.append(_prose(prose))
        parts += [_entry(entry, heading_level + 1) for entry in _entries(body)]
    return "\n".join(parts)


def names(text: str) -> list[str]:
    """Every function and type that the header declares."""
    found = [match.group(1) for match in _FUNCTION.finditer(text)]
    return found + [first or second for first, second in _TYPEDEF.findall(text)]


def _section(comment: str) -> tuple[str, str, str]:
    lines = [re.sub(r"^ \* ?", "", line) for line in comment.splitlines()]
    number, title = lines[0].split(maxsplit=1)
    return number, title.strip(), "\n".join(lines[1:]).strip("\n")


def _prose(text: str) -> str:
    """Comment text as paragraphs; what is indented (formulas, code) stays as it is written."""
    out = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("  "):
            out.append("```text\n" + re.sub(r"^ {2}", "", block, flags=re.MULTILINE) + "\n```\n")
        else:
            out.append(_escape(block) + "\n")
    return "\n".join(out)


def _escape(text: str) -> str:
    """Names become code, so that Markdown takes no underscore or asterisk for emphasis."""
    text = re.sub(r"(?m)^(\w+(?: \w+)?)\. (?=[A-Z])", r"\n**\1.** ", text).strip()
    return re.sub(r"\*?\b\w*(?:_\w+)+\b(?:\[[^\]]*\])*(?:\(\))?", lambda m: f"`{m.group()}`", text)


def _entries(body: str) -> list[str]:
    """Declarations with the comment before each: what empty lines part, at brace depth 0."""
    body = body.split("#ifdef __cplusplus")[0]
    entries, current, depth = [], [], 0
    for line in body.splitlines():
        code = re.sub(r"/\*.*?\*/", "", line)
        depth += code.count("{") - code.count("}")
        if line.strip() or depth > 0:
            current.append(line)
        elif current:
            entries.append("\n".join(current))
            current = []
    return [*entries, "\n".join(current)] if current else entries


def _entry(entry: str, level: int) -> str:
    comment, code = "", entry
    match = _COMMENT.match(entry)
    if match:
        comment = re.sub(r"(?m)^ ?\* ?", "", match.group(1)).strip()
        code = entry[match.end() :]
    code = _without_export_macro(code).strip("\n")
    declared = names(entry) or re.findall(r"#define (FULMEN_\w+)", entry)
    heading = f"{'#' * level} {', '.join(f'`{name}`' for name in declared)}" if declared else ""
    block = f"```c\n{code}\n```" if code.strip() else ""
    return "\n\n".join(part for part in (heading, _escape(comment), block) if part) + "\n"


def _without_export_macro(code: str) -> str:
    """Takes FULMEN_API away and moves parameters on following lines back under the first."""
    out, moved = [], 0
    for line in code.splitlines():
        if line.startswith("FULMEN_API "):
            moved = len("FULMEN_API ")
        elif not line.startswith(" " * 12):
            moved = 0
        out.append(line[moved:])
    return "\n".join(out)


if __name__ == "__main__":
    sys.stdout.write(markdown(Path(HEADER).read_text(encoding="utf-8")))
