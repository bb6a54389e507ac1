# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes what pages quote from other files into the pages, so that it is seen wherever they are.

    docs_tables.py            rewrites every generated part of the README and the pages below docs/
    docs_tables.py --check    names the parts that are not what their sources say (`make check`)

A page holds a part between two comments, the first of which says what it is:

    <!-- begin generated: results FILE CASE -->      the table of bench/results/FILE
    <!-- begin generated: records FILE KEY ... -->   these fields of its records, one a line
    <!-- begin generated: rungs FILE -->             a row a rung, its times by shape
    <!-- begin generated: verified FILE LANGUAGE --> what a record of `fulmen verify` says
    <!-- begin generated: planted FILE LANGUAGE --> what a record of planted faults says
    <!-- begin generated: c-api -->                  the reference of fulmen.h
    <!-- begin generated: decisions -->              the table of what lies in docs/decisions
    <!-- begin generated: call-path CALL -->         the files of tools/call_path.txt that a warm
                                                     call passes, or a first one beyond those
    <!-- begin generated: quote FILE[:REGION] INFO -->
                  a file, or what stands in it between "--8<-- [start:REGION]" and "[end:REGION]",
                  in a fence with INFO behind its first mark; without INFO, as it stands
    ...
    <!-- end generated -->
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from itertools import takewhile
from pathlib import Path

import api_reference
import results_table
import verified
from source_tree import ROOT

DOCS = ROOT / "docs"
_PART = re.compile(
    r"(?P<begin><!-- begin generated: (?P<what>.+?) -->\n)"
    r"(?P<text>.*?)(?P<end><!-- end generated -->)",
    re.DOTALL,
)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_DATE = re.compile(r"^Date: ([\d-]+)\. Status: (.+)\.$", re.MULTILINE)


def decisions_table() -> str:
    """A row for each numbered decision, in order; 0000 is the template."""
    rows = ["| decision | date | status |", "| --- | --- | --- |"]
    for path in sorted((DOCS / "decisions").glob("[0-9][0-9][0-9][0-9]-*.md")):
        if path.name.startswith("0000"):
            continue
        text = path.read_text(encoding="utf-8")
        title, date = _TITLE.search(text), _DATE.search(text)
        if title is None or date is None:
            raise ValueError(f"{path.name} lacks the title or the date line of 0000-template.md")
        rows.append(f"| [{title[1]}]({path.name}) | {date[1]} | {date[2]} |")
    return "\n".join(rows)


def purpose(path: Path) -> str:
    """The first sentence of the comment that a source file opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()[3:]
    comment = " ".join(line[2:].strip() for line in takewhile(lambda x: x.startswith("//"), lines))
    return re.split(r"(?<=[.:]) ", comment)[0].rstrip(".:").replace("|", "\\|")


def call_path(call: str) -> str:
    """A row for each file, in the order in which a call reaches it."""
    rows = (ROOT / "tools" / "call_path.txt").read_text(encoding="utf-8").splitlines()
    found = [row.split() for row in rows if row and not row.startswith("#")]
    paths = [name for calls, name in found if ("warm" in calls.split(",")) == (call == "warm")]
    if missing := [name for name in paths if not (ROOT / name).is_file()]:
        raise ValueError(f"tools/call_path.txt names {missing[0]}, which does not exist")
    table = [f"| {name.removeprefix('src/')} | {purpose(ROOT / name)} |" for name in paths]
    return "\n".join([f"| {len(paths)} files of `src` | what each is |", "| --- | --- |", *table])


def quotation(source: str, info: str) -> str:
    """A file of the project, or a region of it, in a fence with `info`, if there is any."""
    name, _, region = source.partition(":")
    text = (ROOT / name).read_text(encoding="utf-8")
    if region:
        begin, end = (rf"^.*--8<-- \[{edge}:{region}\].*$" for edge in ("start", "end"))
        found = re.search(rf"{begin}\n((?:.*\n)*?){end}", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"{name} has no region {region}")
        text = textwrap.dedent(found[1])
    return f"```{info}\n{text.rstrip()}\n```" if info else text.strip()


def text_of(what: str) -> str:
    """The text of a part, from the words of its first comment."""
    kind, *words = what.split()
    if kind == "results":
        return results_table.table(*words)
    if kind == "records":
        return results_table.listing(*words)
    if kind == "rungs":
        return results_table.rungs(*words)
    if kind == "caches":
        return results_table.caches(*words)
    if kind == "verified":
        return verified.sentence(*words)
    if kind == "planted":
        return verified.planted(*words)
    if kind == "c-api":
        return api_reference.markdown(api_reference.HEADER.read_text(encoding="utf-8")).rstrip()
    if kind == "call-path":
        return call_path(*words)
    if kind == "quote":
        return quotation(words[0], " ".join(words[1:]))
    if kind == "decisions":
        return decisions_table()
    raise ValueError(f"nothing generates '{what}'")


def written(page: str) -> str:
    """The text of a page with every part as its source says."""
    return _PART.sub(lambda m: f"{m['begin']}\n{text_of(m['what'])}\n\n{m['end']}", page)


def without_parts(page: str) -> str:
    """The text of a page that people wrote."""
    return _PART.sub("", page)


def stale_parts(page: str) -> list[str]:
    """What the parts that differ from their sources are called; and why, where they have none."""
    stale = []
    for match in _PART.finditer(page):
        try:
            if match["text"].strip() != text_of(match["what"]):
                stale.append(match["what"])
        except (OSError, ValueError) as error:
            stale.append(f"{match['what']} ({error})")
    return stale


def pages() -> list[Path]:
    """What readers see: the README in both languages, and docs/."""
    return [*sorted(ROOT.glob("README*.md")), *sorted(DOCS.rglob("*.md"))]


def say_notes(page: str) -> None:
    """What is no failure, but should be known of the records that a page quotes."""
    for match in _PART.finditer(page):
        kind, *words = match["what"].split()
        if kind == "verified" and (said := verified.note(words[0])):
            print(f"docs_tables: note: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes generated parts into the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    check = parser.parse_args().check
    stale = 0
    for path in pages():
        page = path.read_text(encoding="utf-8")
        if path.name == "README.md" and path.parent == ROOT:
            say_notes(page)
        if not check:
            path.write_text(written(page), encoding="utf-8")
            continue
        for what in stale_parts(page):
            stale += 1
            print(f"{path.relative_to(ROOT)}: '{what}' is stale: run python tools/docs_tables.py")
    print(f"docs_tables: {stale} stale part(s)" if check else "docs_tables: pages are written")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
