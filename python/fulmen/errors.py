# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What fulmen raises: one tree, the one table from the statuses of fulmen.h to it, and the checks
of plain arguments (numbers, words, lists of words) that raise it.

Each error carries one sentence: what was wrong, what was given, what is allowed. Nothing has been
written when it is raised. Each class is also the built-in that fits, so that `except ValueError`
works.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ArgumentError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Error",
    "LibraryNotFound",
    "OutOfMemoryError",
    "ShapeError",
    "UnsupportedError",
]


class Error(Exception):
    """Any error of fulmen; by itself, a bug in fulmen (FULMEN_ERROR_INTERNAL)."""

    __module__ = "fulmen"


class ArgumentError(Error, ValueError):
    """A value outside what is allowed, an array that is missing, arrays that overlap."""

    __module__ = "fulmen"


class ShapeError(ArgumentError):
    """Ranks or extents that do not fit together."""

    __module__ = "fulmen"


class DTypeError(Error, TypeError):
    """A dtype or a mixture of dtypes that is not allowed, or something that is not an array."""

    __module__ = "fulmen"


class UnsupportedError(Error, NotImplementedError):
    """Legal, but not what the chosen backend or this version can do."""

    __module__ = "fulmen"


class DeviceError(Error, RuntimeError):
    """The device or its driver failed."""

    __module__ = "fulmen"


class CompileError(Error, RuntimeError):
    """A kernel did not compile; the text ends with the compiler's log."""

    __module__ = "fulmen"


class LibraryNotFound(Error, ImportError):  # noqa: N818  the name users read
    """A library that the call needs is not on this machine; the text lists every path tried."""

    __module__ = "fulmen"


class OutOfMemoryError(Error, MemoryError):
    """The host or the device had no memory left."""

    __module__ = "fulmen"


# fulmen_status_name() of fulmen.h -> the class that is raised.
STATUS_ERRORS: dict[str, type[Error]] = {
    "FULMEN_ERROR_ARGUMENT": ArgumentError,
    "FULMEN_ERROR_SHAPE": ShapeError,
    "FULMEN_ERROR_DTYPE": DTypeError,
    "FULMEN_ERROR_UNSUPPORTED": UnsupportedError,
    "FULMEN_ERROR_DEVICE": DeviceError,
    "FULMEN_ERROR_COMPILE": CompileError,
    "FULMEN_ERROR_NOT_FOUND": LibraryNotFound,
    "FULMEN_ERROR_OUT_OF_MEMORY": OutOfMemoryError,
    "FULMEN_ERROR_INTERNAL": Error,
}

LONGEST_SHOWN = 100  # characters of a value in a sentence


def kind_of(value: Any) -> str:
    """The type of a value as a sentence names it, of an array its dtype and shape too."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    is_array = dtype is not None and isinstance(shape, tuple) and tuple(shape) != ()
    named = type(value).__name__
    return f"{named} of {dtype} {tuple(shape or ())}" if is_array else named


def shown(value: Any) -> str:
    """A value as a sentence names it: an array by its kind, others by their text, cut short."""
    kind = kind_of(value)
    if kind != type(value).__name__:
        return kind
    try:
        text = " ".join(repr(value).split())
    except Exception:  # what a foreign class makes of itself, or an integer of 5000 digits
        return kind
    return printable(text)


def printable(text: str) -> str:
    """A text of the caller's that a sentence may hold: no terminal obeys it, and it is short."""
    text = "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def whole(
    name: str,
    value: Any,
    least: int = -(2**63),
    below: int = 2**63,
    expected: str = "an integer is expected",
) -> int:
    """An argument that is an integer.

    Raises:
        DTypeError: it is none.
        ArgumentError: it is below `least`, or not below `below`.
    """
    try:
        number = operator.index(value)
    except Exception:  # an array of several answers with an error of its own
        raise DTypeError(f"{name} is {shown(value)}; {expected}") from None
    if not least <= number < below:
        is_small = least >= 0 and number < least
        allowed = f"at least {least} is allowed" if is_small else "a 64-bit integer is expected"
        if number >= below and below < 2**63:
            allowed = f"below {below} is allowed"
        raise ArgumentError(f"{name} is {shown(number)}; {allowed}")
    return number


def refuse_tracer(x: Any, name: str) -> None:
    """Refuses what stands for an array while JAX traces a function: it has no memory yet.

    Raises:
        DTypeError: x is a tracer.
    """
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise DTypeError(
            f"{name} is a tracer of JAX (jit, grad, vmap); inside of its transformations call "
            "fulmen.jax.attention, which takes the same options"
        )


def flag(name: str, value: Any, hint: str = "") -> int:
    """An argument that is True or False, NumPy's and 1 and 0 among them.

    Raises:
        DTypeError: it is neither.
    """
    if isinstance(value, int) and value in (0, 1):
        return int(value)
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", 0) == ():
        return int(value)
    raise DTypeError(f"{name} is {shown(value)}; True or False is expected{hint}")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """An argument that is one of a few words.

    Raises:
        ArgumentError: it is not.
    """
    allowed = tuple(allowed)
    if isinstance(value, str) and value in allowed:
        return value
    raise ArgumentError(f"{name} is {shown(value)}; allowed are {', '.join(map(repr, allowed))}")


def words(name: str, value: Any, example: str) -> tuple[str, ...]:
    """An argument that is a list of words, or one word alone.

    Raises:
        DTypeError: it is neither.
    """
    try:
        found = (value,) if isinstance(value, str) else tuple(value)
    except Exception:
        found = (None,)
    if not all(isinstance(word, str) for word in found):
        raise DTypeError(f"{name} is {shown(value)}; a list of words such as {example} is expected")
    return found


def text(name: str, value: Any, example: str) -> str:
    """An argument that is a text which the library can read: UTF-8 without a NUL.

    Raises:
        DTypeError: no text.
        ArgumentError: one that the library cannot read.
    """
    if not isinstance(value, str):
        raise DTypeError(f"{name} is {shown(value)}; a text such as {example!r} is expected")
    is_cut = not value.isascii() and any("\ud800" <= x <= "\udfff" for x in value)
    if "\0" in value or is_cut:
        raise ArgumentError(f"{name} is {shown(value)}; a text of UTF-8 without NUL is expected")
    return value


def refuse_masked(name: str, x: Any) -> None:
    """Refuses an array of numpy.ma, whose own mask no call reads.

    Raises:
        UnsupportedError: it is one.
    """
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(x, ma.MaskedArray):
        raise UnsupportedError(
            f"{name} is an array of numpy.ma, whose own mask is not read; {name}.filled(...) is a "
            f"plain array, and ~numpy.ma.getmaskarray({name}) a boolean one for mask="
        )
