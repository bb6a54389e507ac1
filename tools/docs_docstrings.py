# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plain docstrings as Markdown for the reference (an extension of griffe, see mkdocs.yml).

A paragraph that starts with >>> would otherwise be three nested quotations, and 2**64 ... 2**32
would print what stands between in bold.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)


def as_markdown(text: str) -> str:
    """A fence around each paragraph of doctest, and powers outside them escaped."""
    parts, end = [], 0
    for match in _DOCTEST.finditer(text):
        parts += [_escaped(text[end : match.start()]), f"```pycon\n{match.group()}\n```"]
        end = match.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"(?<=\w)\*\*(?=\w)", r"\\*\\*", text)


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
