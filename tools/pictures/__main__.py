# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages into docs/LANGUAGE/pictures, from the package's own numbers.

python tools/pictures                writes every picture, in both languages
python tools/pictures masks heads    these
python tools/pictures --check        writes nothing; names those that are not what the code draws
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import backward
import dropout
import flow
import fragments
import hopper
import latent
import layouts
import lessons
import masks
import memory
import merge
import orders
import pages
import precision
import rates
import softmax
from canvas import Picture

DOCS = Path(__file__).resolve().parents[2] / "docs"
LANGUAGES = ("en", "zh")
PICTURES = {
    name: drawn
    for theme in (
        masks,
        layouts,
        pages,
        softmax,
        memory,
        backward,
        hopper,
        lessons,
        orders,
        fragments,
        flow,
        latent,
        merge,
        dropout,
        precision,
        rates,
    )
    for name, drawn in theme.PICTURES.items()
}


def drawn(name: str, language: str) -> str:
    """The file of a picture."""
    height, titles, draw = PICTURES[name]
    picture = Picture(language, height, titles[LANGUAGES.index(language)])
    try:
        draw(picture)
    except ValueError as error:
        raise ValueError(f"{name}, {language}: {error}") from error
    return picture.svg()


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the pictures of the pages.")
    parser.add_argument("names", nargs="*", help=f"only these of {', '.join(PICTURES)}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PICTURES):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    files = {
        DOCS / language / "pictures" / f"{name}.svg": (name, language)
        for language in LANGUAGES
        for name in given.names or PICTURES
    }
    stale = 0
    for path, (name, language) in files.items():
        text = drawn(name, language)
        if not given.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale += 1
            print(f"{path.relative_to(DOCS.parent)} is stale: run python tools/pictures {name}")
    print(
        f"pictures: {stale} of {len(files)} stale"
        if given.check
        else f"pictures: {len(files)} written"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
