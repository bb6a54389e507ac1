# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that several commands read; what is wrong with one is said before any work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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


def window(text: str) -> Any:
    """None, W or LEFT,RIGHT."""
    try:
        return parse_window(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def shape_of(text: str) -> tuple[int, ...]:
    """Batch, heads, rows and dim.

    Raises:
        BadInputError: SHAPE is not one.
    """
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise BadInputError(
            f"SHAPE is {text!r}; BATCHxHEADSxROWSxDIM is expected, such as 2x8x1024x64"
        )
    return tuple(int(part) for part in parts)
