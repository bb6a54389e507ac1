# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What commands print: lines and tables for people, one JSON object for machines.

Colour and progress only on a terminal, and no colour with NO_COLOR; rich sees to both. With --json
standard output holds the object and nothing else.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ACCEPTABLE, BAD = "green", "bold red"
FILE_COLUMNS = 100  # of wrapped text where there is no terminal


class BadInputError(Exception):
    """What the user gave cannot be used: one sentence, exit code 2."""


class Output:
    """Where a command prints to."""

    def __init__(self, as_json: bool) -> None:
        """Text, or with as_json nothing until `json`."""
        self.as_json = as_json
        self._console = Console(highlight=False, soft_wrap=True, quiet=as_json)
        if not self._console.is_terminal:  # a table in a file is as wide as its cells
            self._console.width = 1000
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        """One line of text."""
        self._console.print(printable(text), style=style or None, markup=False)

    def wrapped(self, head: str, text: str, style: str = "") -> None:
        """A head and a text beside it, which goes on below itself where a line is full."""
        width = self._console.width if self._console.is_terminal else FILE_COLUMNS
        body = textwrap.wrap(
            text, max(width - len(head), 40), break_long_words=False, break_on_hyphens=False
        )
        for index, part in enumerate(body or [""]):
            self.line((head if index == 0 else " " * len(head)) + part, style)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        styles: Callable[[Sequence[str]], str] = lambda _: "",
    ) -> None:
        """A table; the first column is text, the others are figures where they begin with one."""
        rows = list(rows)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows]
            figures = index > 0 and all(c[:1].isdigit() or c[:1] in "-<" for c in cells if c)
            table.add_column(column, justify="right" if figures else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_escaped(cell) for cell in row), style=styles(row) or None)
        if self._console.is_terminal:
            self._console.print(table)
            return
        with (
            self._console.capture() as printed
        ):  # without the blanks that make columns equally wide
            self._console.print(table)
        for line in printed.get().splitlines():
            self.line(line.rstrip())

    def json(self, value: Any) -> None:
        """The result of a command with --json; numbers that are not finite become null."""
        json.dump(_finite(value), sys.stdout, indent=2)
        sys.stdout.write("\n")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """A bar on the terminal while work lasts; yields a function that advances it by so many
        steps and, given a text too, says beside the bar what runs now.
        """
        show = self._errors.is_terminal and not self.as_json
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=self._errors,
            transient=True,
            disable=not show,
        )
        with bar:
            task = bar.add_task(title, total=total, now="")

            def advance(steps: int, now: str = "") -> None:
                bar.update(task, advance=steps, now=now)

            yield advance


def printable(text: str) -> str:
    """Text that moves no cursor and changes no colour: names from files are shown, not obeyed."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def _escaped(cell: str) -> str:
    return printable(cell).replace("[", "\\[")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def bytes_text(count: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def seconds_text(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.3g} s"
