# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A picture of the pages: one palette, light and dark, in English or Chinese.

Colours have roles and the same role means the same array in every picture: q, k, v, o, `hot` for
what changes or is added to, `plain` for the rest. Text in two languages is given side by side,
and where it stands is reckoned with widths of characters that are on the wide side: two texts
that would touch, and one that would leave the picture, are a ValueError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import drawsvg

WIDTH = 720
CORNER = 3  # of a cell: the width of a stroke that rounds it
ROUND = f"stroke-width: {CORNER}; stroke-linejoin: round"
FONT = (
    "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','Noto Sans CJK SC','PingFang SC',"
    "'Microsoft YaHei',sans-serif"
)
MONO = "ui-monospace,SFMono-Regular,'Cascadia Mono','DejaVu Sans Mono',Consolas,monospace"

# role -> fill, line and text, light; the same, dark
PALETTE = {
    "q": (("#dfe9fb", "#2f6bd0", "#1d4f9f"), ("#1f3358", "#7ba7f5", "#a9c7fb")),
    "k": (("#fdebc9", "#c98a0c", "#855800"), ("#4b380f", "#e3b04b", "#f0cd86")),
    "v": (("#d5f0e4", "#1c9470", "#0f6a4f"), ("#123f33", "#55c6a0", "#8fdfc3")),
    "o": (("#e8defa", "#8054c7", "#5d36a0"), ("#39295a", "#b696f1", "#d0bbf8")),
    "hot": (("#fcdfdc", "#d0443a", "#a32a22"), ("#55251f", "#f28b80", "#f8b3ab")),
    "plain": (("#eef1f5", "#8d97a6", "#3d4653"), ("#2a303b", "#7c8798", "#c3cad6")),
}
INK = (("#1d2430", "#5a6574", "#d3d9e2", "#ffffff"), ("#e8ecf2", "#a1acbb", "#3b4453", "#1a1e27"))

Point = tuple[float, float]
# name -> height, titles in English and Chinese, and who draws it
Drawings = dict[str, tuple[float, tuple[str, str], "Callable[[Picture], None]"]]


class Box(NamedTuple):
    """A rectangle on the picture."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def meets(self, other: Box) -> bool:
        return (
            self.x < other.right
            and other.x < self.right
            and self.y < other.bottom
            and other.y < self.bottom
        )


class Picture:
    """What is drawn so far, and the texts, each of which has a place of its own."""

    def __init__(self, language: str, height: float, title: str) -> None:
        self.language = language
        self.height = height
        self._texts: list[tuple[str, Box]] = []
        self._classes: set[str] = set()
        self._drawing = drawsvg.Drawing(WIDTH, height, class_="picture", role="img")
        self._drawing.append_title(title)
        self._add(drawsvg.Rectangle(0, 0, WIDTH, height, rx=10, class_=self._class("paper")))

    def say(self, english: str, chinese: str) -> str:
        """The text in the language of this picture."""
        return chinese if self.language == "zh" else english

    # Shapes

    def box(self, box: Box, role: str = "plain", *, radius: float = 6, dashed: bool = False) -> Box:
        """A rectangle with the fill and the line of a role; dashed: a line alone."""
        name = self._class(f"{role}-dashed" if dashed else f"{role}-box")
        self._add(drawsvg.Rectangle(*_rounded(*box), rx=radius, class_=name))
        return box

    def bar(self, box: Box, role: str, *, radius: float = 3) -> Box:
        """A rectangle of full colour."""
        self._add(
            drawsvg.Rectangle(*_rounded(*box), rx=radius, class_=self._class(f"{role}-solid"))
        )
        return box

    def cells(self, at: Point, pitch: float, places: Sequence[tuple[int, int]], kind: str) -> None:
        """Squares at (row, column) of a grid whose corner is `at`; kind: "q-cell", "hidden"."""
        size = pitch - 2 - CORNER
        square = f"h{_number(size)}v{_number(size)}h-{_number(size)}z"
        inset = (pitch - size) / 2
        path = "".join(
            f"M{_number(at[0] + inset + column * pitch)} "
            f"{_number(at[1] + inset + row * pitch)}{square}"
            for row, column in places
        )
        if path:
            self._add(drawsvg.Path(path, class_=self._class(kind)))

    def line(
        self,
        points: Sequence[Point],
        role: str = "ink",
        *,
        dashed: bool = False,
        bold: bool = False,
    ) -> None:
        """Straight strokes from point to point."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        name = self._class(f"{role}-{'dashes' if dashed else 'stroke' if bold else 'line'}")
        self._add(drawsvg.Path(path, class_=name))

    def arrow(
        self, points: Sequence[Point], role: str = "ink", *, dashed: bool = False, size: float = 7
    ) -> None:
        """Strokes that end in a head, at the last point."""
        (x0, y0), (x1, y1) = points[-2:]
        along = math.atan2(y1 - y0, x1 - x0)
        back = (x1 - size * math.cos(along), y1 - size * math.sin(along))
        self.line([*points[:-1], back], role, dashed=dashed)
        wings = [
            (x1 - size * math.cos(along + turn) * 1.15, y1 - size * math.sin(along + turn) * 1.15)
            for turn in (0.45, -0.45)
        ]
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in [(x1, y1), *wings]) + "z"
        self._add(drawsvg.Path(path, class_=self._class(f"{role}-head")))

    # Texts

    def text(
        self,
        at: Point,
        words: str,
        *,
        size: float = 13,
        role: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        turned: bool = False,
    ) -> Box:
        """Words whose baseline is at `at`; x_{y} and x^{y} lower and raise y. Returns their box.

        Lines after the first one, where words have several, follow below.
        """
        words, _, more = words.partition("\n")
        width = text_width(words, size, mono=mono, bold=bold)
        left = at[0] - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        box = Box(left, at[1] - 0.78 * size, width, 1.0 * size)
        if turned:  # reads from below to above, around `at`
            box = Box(at[0] - 0.78 * size, at[1] - width / 2, size, width)
        self._claim(words, box)
        classes = [f"{role}-text", *(["bold"] if bold else []), *(["mono"] if mono else [])]
        options = {"class_": " ".join(map(self._class, classes))}
        if anchor != "start":
            options["text_anchor"] = anchor
        if turned:
            options["transform"] = f"rotate(-90 {_number(at[0])} {_number(at[1])})"
        element = drawsvg.Text("", size, *_rounded(*at), **options)
        for span in _spans(words, size):
            element.append(span)
        self._add(element)
        if more:
            below = (at[0], at[1] + round(1.7 * size))
            self.text(below, more, size=size, role=role, anchor=anchor, mono=mono)
        return box

    def label(
        self,
        box: Box,
        *lines: str,
        size: float = 13,
        role: str = "ink",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Lines in the middle of a box, the first one bold where `bold` says so."""
        x, y = box.middle
        step = 1.38 * size
        first = y - step * (len(lines) - 1) / 2 + 0.35 * size
        for number, words in enumerate(lines):
            width = text_width(words, size, mono=mono, bold=bold and number == 0)
            if width > box.width - 4:
                raise ValueError(f"'{words}' is {width:.0f} wide in a box of {box.width:.0f}")
            self.text(
                (x, first + number * step),
                words,
                size=size,
                role=role,
                anchor="middle",
                bold=bold and number == 0,
                mono=mono,
            )

    def legend(self, at: Point, entries: Sequence[tuple[str, str]], *, gap: float = 26) -> None:
        """Squares with what they mean, in one line; entries: (kind of cell, words)."""
        x, y = at
        for kind, words in entries:
            self.cells((x, y - 11), 15, [(0, 0)], kind)
            x = self.text((x + 22, y), words, size=13, role="soft").right + gap

    # The file

    def svg(self) -> str:
        """The text of the file."""
        self._drawing.append_css("\n" + _style(self._classes))
        text: str = self._drawing.as_svg(header="")
        return text.strip() + "\n"

    def _add(self, element: drawsvg.DrawingElement) -> None:
        self._drawing.append(element)

    def _class(self, name: str) -> str:
        self._classes.add(name)
        return name

    def _claim(self, words: str, box: Box) -> None:
        if box.x < 4 or box.right > WIDTH - 4 or box.y < 4 or box.bottom > self.height - 2:
            raise ValueError(f"'{words}' leaves the picture: {box}")
        for other, where in self._texts:
            if box.meets(where):
                raise ValueError(f"'{words}' meets '{other}': {box} {where}")
        self._texts.append((words, box))


def text_width(words: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """On the wide side: fonts of readers differ. Indices are smaller."""
    total = 0.0
    for part, shift in _parts(words):
        scale = 0.72 if shift else 1.0
        total += scale * sum(_character_width(character, mono) for character in part)
    return total * size * (1.13 if bold and not mono else 1.0)


def _character_width(character: str, mono: bool) -> float:
    if ord(character) > 0x2E80:  # Chinese
        return 1.0
    if mono:
        return 0.61
    if character in " ijl.,:;'|!()[]":
        return 0.32
    if character in "ftr-/I":
        return 0.42
    if character in "mwMW@%":
        return 0.9
    return 0.70 if character.isupper() or ord(character) > 0x2000 else 0.58


_INDEX = re.compile(r"([_^])\{([^}]*)\}")


def _parts(words: str) -> list[tuple[str, str]]:
    """Pieces of words: (piece, "" or "_" or "^")."""
    pieces = _INDEX.split(words)  # text, sign, index, text, sign, index, ..., text
    found = [(pieces[0], "")]
    for sign, index, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        found += [(index, sign), (after, "")]
    return [part for part in found if part[0]]


def _spans(words: str, size: float) -> list[drawsvg.TSpan]:
    spans, lowered = [], 0.0
    for part, shift in _parts(words):
        wanted = {"": 0.0, "_": 0.24, "^": -0.36}[shift] * size
        options: dict[str, object] = {}
        if wanted != lowered:
            options["dy"] = round(wanted - lowered, 2)
        if shift:
            options["font_size"] = round(0.72 * size, 2)
        lowered = wanted
        spans.append(drawsvg.TSpan(part, **options))
    return spans


def _rounded(*numbers: float) -> list[float]:
    """As far as an eye sees, and the same on machines whose last bits differ."""
    return [round(x, 2) for x in numbers]


def _number(x: float) -> str:
    return f"{round(x, 2):g}"


def _style(classes: set[str]) -> str:
    light = "".join(_rules(sorted(classes), 0, full=True))
    dark = "".join(f"  {rule}" for rule in _rules(sorted(classes), 1, full=False))
    return f"{light}@media (prefers-color-scheme:dark) {{\n{dark}}}\n"


def _rules(classes: list[str], scheme: int, *, full: bool) -> list[str]:
    """Of one scheme; `full`: with what does not depend on it."""
    ink, soft, faint, paper = INK[scheme]
    rules = [f".picture text {{ font-family: {FONT} }}\n"] if full else []
    for name in classes:
        role, _, kind = name.partition("-")
        if role in PALETTE:
            fill, line, words = PALETTE[role][scheme]
        else:
            fill, line, words = {
                "ink": (ink, ink, ink),
                "soft": (soft, soft, soft),
                "faint": (faint, faint, faint),
            }.get(role, (paper, faint, ink))
        colours, shape = {
            "paper": (f"fill: {paper}", ""),
            "hidden": (f"fill: {faint}; stroke: {faint}", f"opacity: 0.55; {ROUND}"),
            "bold": ("", "font-weight: 600"),
            "mono": ("", f"font-family: {MONO}"),
        }.get(name) or {
            "box": (f"fill: {fill}; stroke: {line}", "stroke-width: 1.3"),
            "dashed": (f"stroke: {line}", "fill: none; stroke-width: 1.3; stroke-dasharray: 5 4"),
            "solid": (f"fill: {line}", ""),
            "cell": (f"fill: {line}; stroke: {line}", ROUND),
            "line": (f"stroke: {line}", "fill: none; stroke-width: 1.5; stroke-linejoin: round"),
            "stroke": (f"stroke: {line}", "fill: none; stroke-width: 2.6; stroke-linejoin: round"),
            "dashes": (f"stroke: {line}", "fill: none; stroke-width: 1.5; stroke-dasharray: 4 4"),
            "head": (f"fill: {line}", ""),
            "text": (f"fill: {words}", ""),
        }[kind]
        said = "; ".join(part for part in (colours, shape if full else "") if part)
        if said:
            prefix = ".picture text" if name == "mono" else ".picture "
            rules.append(f"{prefix}.{name} {{ {said} }}\n")
    return rules
