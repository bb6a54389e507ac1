# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where functions and loops of C++ and functions of Python begin and end, found by their braces.

Made for code in this project's format; nothing is parsed, so a macro that hides a brace is not
seen. Lambdas belong to the function that they stand in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from product_code import Source

_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"' r"|'(?:\\.|[^'\\\n])'")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_SCOPE = re.compile(
    r"(template\s*<.*>\s*)?(inline\s+)?(namespace|struct|class|union|enum|extern)\b"
)
_LOOP = re.compile(r"(for|while|do)\b")
_CLASS_OF_WORDS = {"if", "else", "switch", "try", "catch", "return"}


@dataclass(frozen=True)
class Block:
    name: str  # the file
    first: int  # line of the signature, or of the loop's head
    last: int
    is_loop: bool

    @property
    def lines(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.name}:{self.first}"


def blocks_of(source: Source) -> list[Block]:
    return [*_python(source)] if source.name.endswith(".py") else [*_cpp(source)]


def _python(source: Source) -> Iterator[Block]:
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield Block(source.name, node.lineno, node.end_lineno, False)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _cpp(source: Source) -> Iterator[Block]:
    code = _DIRECTIVE.sub(_blank, _STRING.sub(_blank, source.code))
    open_blocks: list[tuple[str, int]] = []  # kind, first line
    head = 0  # where the text that leads to the next brace begins
    depth = 0  # of parentheses
    line = 1
    for at, char in enumerate(code):
        if char == "\n":
            line += 1
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "{":
            leading = code[head:at]
            kind = _kind(leading.strip(), depth, [kind for kind, _ in open_blocks])
            first = line - leading.lstrip().count("\n")
            open_blocks.append((kind, first))
            head = at + 1
        elif char == "}" and open_blocks:
            kind, first = open_blocks.pop()
            if kind in ("function", "loop"):
                yield Block(source.name, first, line, kind == "loop")
            head = at + 1
        elif char == ";" and depth == 0:
            head = at + 1


def _kind(leading: str, depth: int, around: list[str]) -> str:
    """scope, function, loop or other, from what stands before a brace."""
    if depth > 0:
        return "loop" if _LOOP.match(leading) else "other"
    if _LOOP.match(leading):
        return "loop"
    if _SCOPE.match(leading) and "(" not in re.sub(r"alignas\(.*?\)", "", leading):
        return "scope"
    is_inside = any(kind != "scope" for kind in around)
    words = leading.split("(")[0].split()
    if is_inside or "(" not in leading or not words or words[0] in _CLASS_OF_WORDS:
        return "other"
    return "function"
