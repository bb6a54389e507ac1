# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds libfulmen, loads it once, and calls it.

The library speaks the C calling convention of apache-tvm-ffi (src/ffi). FULMEN_LIBRARY names
another build of it; otherwise it is the one beside this package.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable

from .errors import STATUS_ERRORS, Error, LibraryNotFound

Function = Callable[..., int]

# The order of fulmen_tensors in fulmen.h.
ARRAY_NAMES = (
    *("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths"),
    *("cu_q", "cu_kv", "q_ids", "kv_ids"),
    *("o", "lse", "stats", "do", "dlse", "dq", "dk", "dv", "dbias", "dsinks"),
)
FORWARD_RESULTS = range(13, 16)  # o, lse, stats
BACKWARD_RESULTS = range(18, 23)  # dq, dk, dv, dbias, dsinks

_VERBS = (
    *("forward", "backward", "explain", "dense_mask", "merge", "build_info"),
    *("plan_create", "plan_destroy", "plan_workspace_bytes", "plan_explain"),
    *("plan_forward", "plan_backward"),
)


class Library:
    """The exports of src/ffi/exports.cpp by name; each takes its arguments by position."""

    __slots__ = (*_VERBS, "path")

    forward: Function
    backward: Function
    plan_create: Function
    plan_destroy: Function
    plan_workspace_bytes: Function
    plan_forward: Function
    plan_backward: Function
    plan_explain: Function
    explain: Function
    build_info: Function
    dense_mask: Function
    merge: Function
    path: str


_loaded: Library | None = None
_lock = threading.Lock()


def library() -> Library:
    """The library, loaded at the first call."""
    return _loaded or _load()


def candidates() -> list[str]:
    """Where the library may be, in order; FULMEN_LIBRARY alone where it is set."""
    chosen = os.environ.get("FULMEN_LIBRARY")
    if chosen:
        return [chosen]
    from importlib.resources import files  # an editable install keeps it elsewhere

    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return [str(files("fulmen").joinpath("lib", f"libfulmen.{suffix}"))]


def find() -> str:
    """The first candidate that is a file.

    Raises:
        LibraryNotFound: none is; the text lists them.
    """
    tried = candidates()
    for path in tried:
        if os.path.isfile(path):
            return path
    advice = (
        "FULMEN_LIBRARY names it" if os.environ.get("FULMEN_LIBRARY") else "pip install . builds it"
    )
    raise LibraryNotFound(f"libfulmen is not at {' or '.join(tried)}; {advice}")


def import_tvm_ffi() -> Any:
    """The tvm_ffi package, without the torch that it imports when it finds one.

    That import takes a second and nobody has asked for it: a program that uses torch has imported
    it before, and its tensors are read through DLPack in either order.
    """
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    except ImportError as error:
        raise LibraryNotFound(
            f"the package apache-tvm-ffi does not load ({error}); pip install apache-tvm-ffi"
        ) from error
    finally:
        if absent:
            del sys.modules["torch"]
    return tvm_ffi


def _load() -> Library:
    global _loaded  # noqa: PLW0603  loaded once for the process
    with _lock:
        if _loaded is not None:
            return _loaded
        path = find()
        tvm_ffi = import_tvm_ffi()
        for status, kind in STATUS_ERRORS.items():
            tvm_ffi.register_error(status, kind)
        found = Library()
        found.path = path
        try:
            module = tvm_ffi.load_module(path)
            for verb in _VERBS:
                setattr(found, verb, module.get_function(f"fulmen_{verb}"))
        except Exception as error:
            text = str(error).strip().splitlines()
            raise LibraryNotFound(f"{path} is not a libfulmen that loads: {text[0]}") from error
        _loaded = found
        return found


def text_of(function: Function, *before: Any) -> str:
    """Calls a function that writes a text, with room enough for it."""
    import numpy as np

    room = 4096
    while True:
        buffer = np.zeros(room, np.uint8)
        needed = function(*before, buffer)
        if needed <= room:
            return buffer.tobytes()[: needed - 1].decode()
        room = needed


def call(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str] = ARRAY_NAMES,
) -> int:
    """Calls a function whose arguments end with arrays.

    Args:
        function: of `library()`.
        leading: what comes before the arrays.
        layout: rows_before_heads of src/ffi/arguments.h.
        arrays: in the order of `names`.
        results: which of them are written.
        names: what errors call them.

    Raises:
        Error: as the library says, without the frames in between.
    """
    try:
        return function(*leading, 0, layout, *arrays)
    except Error as error:
        raise error.with_traceback(None) from None
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass  # an array that DLPack does not take as it is: read-only, bfloat16, or refused
    from .arrays import exported

    bits, views = exported(arrays, results, names)
    try:
        return function(*leading, bits, layout, *views)
    except Error as error:
        raise error.with_traceback(None) from None
