# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The parser of `fulmen` takes the command lines that pages show; nothing runs."""

import re
import shlex

import pytest
from markdown_pages import DOCS, ROOT

from fulmen.cli.main import COMMANDS, parser

NAMES = "|".join(COMMANDS)
SHOWN = re.compile(
    rf"`(fulmen (?:{NAMES})\b[^`]*)`|^(?:\$ |    )(fulmen (?:{NAMES})\b.*)$", re.MULTILINE
)
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").rglob("*.md"),
         *(ROOT / "examples").rglob("*.md")]  # fmt: skip
# What stands for something else in a usage line, and what running text leaves out.
MEANT = {"SHAPE": "1x2x8x64", "GPU": "sm_90a", "NAME": "forward", "OPTIONS": "", "CHAPTER": "1"}
LEFT_OUT = {"compile": ["--arch", "sm_90a", "-o", "FILE"], "explain": ["1x2x8x64"]}


def commands() -> list[str]:
    """Every command line that a page shows, once."""
    found = (
        one or other for page in PAGES for one, other in SHOWN.findall(page.read_text("utf-8"))
    )
    return sorted({" ".join(command.split()) for command in found})


@pytest.mark.parametrize("command", commands())
def test_the_parser_takes_it(command: str) -> None:
    words = shlex.split(re.sub(r"[\[\]]", " ", command))[1:]
    words = [word for word in (MEANT.get(word, word) for word in words) if word]
    if words[-1] in ("-o", "--tune"):
        words.append("FILE")
    if not any(re.fullmatch(r"\d+(x\d+)+", word) for word in words):
        words += LEFT_OUT.get(words[0], [])
    assert parser(words[0]).parse_args(words).command == words[0]


def test_pages_show_commands() -> None:
    assert len(commands()) > 20
