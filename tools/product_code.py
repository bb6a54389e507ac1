# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The product's files (include, src, python/fulmen) as code alone: what measures and checks count.

Comments and docstrings are blanked, line by line, so that positions stay; strings are code.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from source_tree import files, relative

FOLDERS = ("include/", "src/", "python/fulmen/")
CPP_SUFFIXES = (".h", ".hpp", ".cuh", ".cpp", ".c", ".def")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"' r"|'(?:\\.|[^'\\\n])'", re.DOTALL)
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One file of the product."""

    name: str
    text: str

    @cached_property
    def code(self) -> str:
        return python_code(self.text) if self.name.endswith(".py") else cpp_code(self.text)


def product(root: Path, *folders: str) -> list[Source]:
    """Every file of the product, or of some of its folders."""
    wanted = folders or FOLDERS
    found = []
    for path in files(root, (*CPP_SUFFIXES, ".py")):
        name = relative(path, root)
        if name.startswith(wanted):
            found.append(Source(name, path.read_text(encoding="utf-8")))
    return found


def cpp_code(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        is_comment = match.group().startswith(("//", "/*"))
        return re.sub(r"[^\n]", " ", match.group()) if is_comment else match.group()

    return _COMMENT.sub(blank, text)


def python_code(text: str) -> str:
    lines = text.splitlines(keepends=True)
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            spans.append((token.start, token.end))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            string = node.body[0]
            ends = string.end_lineno or 0, string.end_col_offset or 0
            spans.append(((string.lineno, string.col_offset), ends))
    for (first, begin), (last, end) in spans:
        for number in range(first, last + 1):
            line = lines[number - 1]
            start = begin if number == first else 0
            stop = end if number == last else len(line.rstrip("\n"))
            lines[number - 1] = line[:start] + " " * (stop - start) + line[stop:]
    return "".join(lines)


def parts(identifier: str) -> list[str]:
    """The words of an identifier: kSoftcapOut, softcap_out and SOFTCAP_OUT are softcap, out."""
    return [part.lower() for part in _PART.findall(identifier)]


def names(code: str, wanted: list[str]) -> bool:
    """Whether an identifier of the code has these words beside each other."""
    count = len(wanted)
    if not re.search(".?".join(map(re.escape, wanted)), code, re.IGNORECASE):
        return False
    for identifier in set(IDENTIFIER.findall(code)):
        words = parts(identifier)
        if any(words[i : i + count] == wanted for i in range(len(words) - count + 1)):
            return True
    return False
