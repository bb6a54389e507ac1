# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What fulmen raises: one tree, and the one table from the statuses of fulmen.h to it.

Each error carries one sentence: what was wrong, what was given, what is allowed. Nothing has been
written when it is raised. Each class is also the built-in that fits, so that `except ValueError`
works.
"""

from __future__ import annotations

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
