# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen learn: the chapters of the course, which lies in the project's repository."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from .arguments import positive
from .output import BadInputError, Output

DESCRIPTION = """\
Compiles and runs the kernels of a chapter of the course, in the emulator and on the GPU where one
is, checks them against float64, and prints what they moved and computed beside what the chapter
predicts. Without a number the chapters are listed. With --exercise it tests an exercise of the
chapter, as its file stands. The exit code is 1 if something is wrong or differs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("chapter", nargs="?", type=positive, metavar="CHAPTER", help="its number")
    add("--exercise", type=positive, metavar="NUMBER", help="test this exercise of the chapter")
    add("--solution", action="store_true", help="with --exercise: test its solution instead")
    add("--on", choices=("emulator", "gpu"), help="only there; default: on both, where a GPU is")


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    if arguments.chapter is None and arguments.exercise is not None:
        raise BadInputError("--exercise is given without a chapter: fulmen learn 1 --exercise 1")
    if arguments.solution and arguments.exercise is None:
        raise BadInputError("--solution is given without --exercise")
    sys.path.insert(0, str(_checkout()))
    from_course = import_module("course.device")
    learn = import_module("course.learn")
    try:
        code: int = learn.main(arguments, output)
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
