# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen learn: the chapters of the course, which lies in the project's repository."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from .arguments import DTYPES, positive
from .output import BadInputError, Output

DESCRIPTION = """\
Compiles and runs the kernels of a chapter of the course, in the emulator and on the GPU where one
is, checks them against float64, and prints what they moved and computed beside what the chapter
predicts. Without a number the chapters are listed. With --exercise it tests an exercise of the
chapter, as its file stands. The exit code is 1 if something is wrong or differs.
`compare` times every rung from the score matrix to the tensor cores beside each other, in Python,
Triton, C++ and CUDA, forward and backward, with errors and what each shape asks of a card.
"""
COMPARE = "compare"
OF_COMPARE = ("shape", "dtype", "causal", "forward", "rounds", "output")  # arguments of it alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("chapter", nargs="?", type=_chapter, metavar="CHAPTER", help=f"its number, or {COMPARE}")
    add("--exercise", type=positive, metavar="NUMBER", help="test this exercise of the chapter")
    add("--solution", action="store_true", help="with --exercise: test its solution instead")
    add("--on", choices=("emulator", "gpu"), help="only there; default: on both, where a GPU is")
    add("--shape", type=positive, nargs=3, action="append", metavar=("S", "D", "H"),
        help=f"{COMPARE}: rows, head dim and heads; may be given several times; 1024 64 8, and on "
        "a GPU 2048 128 12 and 4096 128 16")  # fmt: skip
    add("--dtype", choices=DTYPES[1:], help=f"{COMPARE}: bfloat16 on a GPU, float32 on the CPU")
    add("--causal", action="store_true", default=None, help=f"{COMPARE}: with a causal mask")
    add("--forward", action="store_true", default=None, help=f"{COMPARE}: without gradients")
    add("--rounds", type=positive, metavar="N", help=f"{COMPARE}: rounds of each rung; 5, CPU 2")
    add("-o", "--output", type=Path, metavar="FOLDER",
        help=f"{COMPARE}: write DATE-ladder-CARD.jsonl, .html and plots there")  # fmt: skip


def _chapter(text: str) -> int | str:
    return text if text == COMPARE else positive(text)


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    if arguments.chapter is None and arguments.exercise is not None:
        raise BadInputError("--exercise is given without a chapter: fulmen learn 1 --exercise 1")
    if arguments.solution and arguments.exercise is None:
        raise BadInputError("--solution is given without --exercise")
    if arguments.chapter == COMPARE and arguments.exercise is not None:
        raise BadInputError(f"--exercise is of a chapter, and {COMPARE} is none")
    for name in OF_COMPARE:
        if arguments.chapter != COMPARE and getattr(arguments, name) is not None:
            raise BadInputError(f"--{name} is for fulmen learn {COMPARE}")
    sys.path.insert(0, str(_checkout()))
    from_course = import_module("course.device")
    part = import_module(f"course.{COMPARE if arguments.chapter == COMPARE else 'learn'}")
    try:
        code: int = part.main(arguments, output)
    except from_course.DeviceError as error:
        raise BadInputError(str(error)) from error
    return code


def _checkout() -> Path:
    """The folder with the course: around where the command is called, or around its Python."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(sys.prefix).parent):
        if (folder / "course" / "learn.py").is_file():
            return folder
    raise BadInputError(
        "the course is not in the package: clone the project's repository, call `make run` and "
        "`make course` there, and `.venv/bin/fulmen learn` in it"
    )
