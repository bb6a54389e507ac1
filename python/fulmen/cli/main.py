# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments, calls a command, and answers for what goes wrong.

Exit codes: 0 all well, 1 a result is wrong or something failed, 2 the command line or a file cannot
be used. An error is one sentence on standard error; FULMEN_TRACEBACK=1 shows where it came from.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

# Each is a module beside this one, imported when it is asked for.
COMMANDS = {
    "run": "attention, and gradients where the file has do, on the tensors of a file",
    "verify": "the named cases on every implementation, against float64",
    "bench": "speed, memory and error over a grid of shapes, beside other libraries",
    "ablation": "every optimisation of the GPU kernels off, one at a time: what it buys",
    "explain": "the implementation that a shape would get, why, and what it costs",
    "compile": "GPU kernels ahead of time, without a GPU, in one file",
    "learn": "the chapters of the course, their kernels and the tests of their exercises",
    "doctor": "what works here, and what to do about the rest",
}

# Of the package fulmen_devel, which the extra `devel` installs.
FOLDERS = {"cmake": "the CMake package, for -Dfulmen_DIR=", "include": "the headers, for -I"}


class Parser(argparse.ArgumentParser):
    """Argparse with one sentence for a mistake."""

    def error(self, message: str) -> NoReturn:
        """Prints the sentence and ends with 2."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help shows what is allowed\n")


def parser(chosen: str | None) -> argparse.ArgumentParser:
    """The arguments of the program, and of the command that is chosen."""
    top = Parser(prog="fulmen", description="Exact attention on real tensors.")
    top.add_argument("--version", action="store_true", help="the version of the package, and end")
    for folder, holds in FOLDERS.items():
        top.add_argument(
            f"--{folder}-dir", action="store_true", help=f"the folder of {holds}, and end"
        )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            command = import_module(f".{name}", __package__)
            sub.description = command.DESCRIPTION
            command.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="one JSON object instead of text")
            sub.set_defaults(main=command.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The program `fulmen`.

    Args:
        argv: the arguments without the program; None: those of the process.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # closed by whoever started us
        if sys.stderr is not None:
            sys.stderr.write(
                "fulmen: standard output is closed; send it somewhere, as to /dev/null\n"
            )
        return 2
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show is shown by its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    chosen = next((word for word in argv if word in COMMANDS), None)
    try:
        top = parser(chosen)
    except Exception as error:  # options are read from the library
        return _failed(chosen, error)
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        name = " ".join(filter(None, (top.prog, arguments.command)))
        Parser(prog=name).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.version:
        import fulmen

        sys.stdout.write(f"fulmen {fulmen.__version__}\n")
        return 0
    asked = [folder for folder in FOLDERS if getattr(arguments, f"{folder}_dir")]
    if asked:
        return _print_folders(top, asked)
    if arguments.command is None:
        top.print_help()
        return 2
    from .output import Output

    try:
        code: int = arguments.main(arguments, Output(arguments.json))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _failed(arguments.command, error)


def _print_folders(top: argparse.ArgumentParser, asked: list[str]) -> int:
    try:
        devel = import_module("fulmen_devel")
    except ImportError:
        top.exit(2, "fulmen: headers and the CMake package are not installed; they come with "
                 "fulmen-devel: pip install fulmen[devel]\n")  # fmt: skip
    for folder in asked:
        sys.stdout.write(getattr(devel, f"{folder}_dir")() + "\n")
    return 0


def _failed(command: str | None, error: Exception) -> int:
    """One sentence on standard error, and the exit code."""
    if os.environ.get("FULMEN_TRACEBACK"):
        raise error
    sys.stderr.write(f"fulmen {command}: {_sentence(error)}\n")
    return 2 if _is_callers(error) else 1


def _is_callers(error: Exception) -> bool:
    from fulmen.errors import ArgumentError, DTypeError, UnsupportedError

    from .output import BadInputError

    return isinstance(error, (BadInputError, ArgumentError, DTypeError, UnsupportedError))


def _sentence(error: Exception) -> str:
    from fulmen.errors import Error

    from .output import BadInputError, printable

    text = printable(" ".join(str(error).split()))
    if isinstance(error, (BadInputError, Error)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
