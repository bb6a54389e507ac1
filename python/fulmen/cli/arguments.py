# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that several commands read; what is wrong with one is said before any work."""

from __future__ import annotations

import argparse
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from fulmen.keywords import KEYWORDS
from fulmen.options import names_of, option_rows

from .output import BadInputError
from .tensor_file import parse_window

DTYPES = ("float64", "float32", "float16", "bfloat16")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if text.strip().isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}, where a whole number of at least 1 is expected")


def new_file(text: str) -> Path:
    """The path of a file to write, in a folder that is there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; a file is expected")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder; make it first")
    return path


def add_options(
    parser: argparse.ArgumentParser, only: Container[str] | None = None, **aliases: str
) -> None:
    """A flag for each option of `fulmen.attention` that one word can say, from the schema.

    Args:
        parser: of a command.
        only: these, and --window; None: every one.
        **aliases: shorter flags.
    """
    words: dict[str, Any] = {"real": float, "count": int}
    for name, row in option_rows().items():
        if name not in KEYWORDS or not (only is None or name in only):
            continue
        flags = [f"--{aliases.get(name, name).replace('_', '-')}"]
        more: dict[str, Any] = {"dest": name, "default": None, "help": row["doc"]}
        if row["kind"] == "flag":
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **more)
        elif row["kind"] == "choice":
            parser.add_argument(*flags, choices=names_of(name), **more)
        elif row["kind"] in words:
            parser.add_argument(*flags, type=words[row["kind"]], **more)
    parser.add_argument("--window", type=window, metavar="W|LEFT,RIGHT", help="-1 for no limit")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that add_options read, those that were given."""
    names = [name for name in ("window", *option_rows()) if name in KEYWORDS]
    given = ((name, getattr(arguments, name, None)) for name in names)
    return {name: value for name, value in given if value is not None}


def window(text: str) -> Any:
    """None, W or LEFT,RIGHT."""
    try:
        return parse_window(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def why_no_gpu(gpu: dict[str, Any]) -> str:
    """What keeps calls from a GPU of this machine, by fulmen.gpu_info(); "": nothing does."""
    if not gpu["devices"]:
        return str(gpu["driver_reason"] or "the driver finds no device")
    if gpu["nvrtc"] or gpu["bundle"]:
        return ""
    return f"GPU 0 is left out: {gpu['nvrtc_reason']}"


def shape_of(text: str) -> tuple[int, ...]:
    """Batch, heads, rows and dim.

    Raises:
        BadInputError: SHAPE is not one.
    """
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(re.fullmatch(r"[0-9]{1,18}", part) for part in parts):
        raise BadInputError(
            f"SHAPE is {text!r}; BATCHxHEADSxROWSxDIM is expected, such as 2x8x1024x64"
        )
    return tuple(int(part) for part in parts)
