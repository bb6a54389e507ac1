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
from typing import TYPE_CHECKING, Any, Callable

from .errors import STATUS_ERRORS, Error, LibraryNotFound

if TYPE_CHECKING:
    from .kinds import NumpyKind

Function = Callable[..., int]
Where = tuple[int, "type[NumpyKind]"]  # the stream and the kind of q: what a call runs on

# The order of fulmen_tensors in fulmen.h.
ARRAY_NAMES = (
    *("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths"),
    *("cu_q", "cu_kv", "q_ids", "kv_ids", "rng"),
    *("o", "lse", "stats", "do", "dlse", "dq", "dk", "dv", "dbias", "dsinks"),
)
FORWARD_RESULTS = range(14, 17)  # o, lse, stats
BACKWARD_RESULTS = range(19, 24)  # dq, dk, dv, dbias, dsinks

_VERBS = (
    *("forward", "backward", "explain", "dense_mask", "merge", "build_info"),
    *("plan_create", "plan_destroy", "plan_workspace_bytes", "plan_explain"),
    *("plan_forward", "plan_backward"),
)
_RARE_VERBS = (  # looked up when they are first asked for
    *("gpu_info", "set_nvrtc_candidates", "cache_clear", "device_faults"),
    *("bundle_write", "bundle_load", "plan_create_tuned"),
    *("keep_options", "add_torch_kernels", "raise_refusal"),
)


class Library:
    """The exports of src/ffi/exports.cpp by name; each takes its arguments by position."""

    __slots__ = (*_VERBS, *_RARE_VERBS, "_module", "path")

    _module: Any

    forward: Function
    backward: Function
    plan_create: Function
    plan_create_tuned: Function
    plan_destroy: Function
    plan_workspace_bytes: Function
    plan_forward: Function
    plan_backward: Function
    plan_explain: Function
    explain: Function
    build_info: Function
    dense_mask: Function
    merge: Function
    gpu_info: Function
    set_nvrtc_candidates: Function
    cache_clear: Function
    bundle_write: Function
    bundle_load: Function
    device_faults: Function
    keep_options: Function
    add_torch_kernels: Function
    raise_refusal: Function
    path: str

    def __getattr__(self, verb: str) -> Function:
        if verb not in _RARE_VERBS:
            raise AttributeError(verb)
        function: Function = self._module.get_function(f"fulmen_{verb}")
        setattr(self, verb, function)
        return function


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
            module = found._module = tvm_ffi.load_module(path)
            for verb in _VERBS:
                setattr(found, verb, module.get_function(f"fulmen_{verb}"))
        except Exception as error:
            text = str(error).strip().splitlines()
            raise LibraryNotFound(f"{path} is not a libfulmen that loads: {text[0]}") from error
        _loaded = found
        return found


def text_argument(text: str) -> Any:
    """A text as the library reads it: bytes in an array; None where it is empty."""
    import numpy as np

    return np.frombuffer(bytearray(text.encode()), np.uint8) if text else None


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
    """Calls a function whose arguments end with arrays, and which enqueues nothing.

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
    return call_exported(function, leading, layout, arrays, results, names, 0)


def call_exported(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str],
    stream: int,
) -> int:
    """As `call`, with views of the arrays that `stream` may read when it comes to them."""
    from .arrays import exported, exported_workspace

    bits, views = exported(arrays, results, names, stream)
    leading = tuple(exported_workspace(x, stream) for x in leading)
    try:
        return function(*leading, bits, layout, *views)
    except Error as error:
        raise error.with_traceback(None) from None


def run(
    function: Function,
    leading: tuple[Any, ...],
    where: Where,
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str] = ARRAY_NAMES,
) -> tuple[Any, ...]:
    """Calls a function that computes: its arguments are `leading`, the stream and the arrays.

    Args:
        function: of `library()`.
        leading: what comes before the stream.
        where: of `prepare`: the stream, and the kind of q.
        layout, arrays, results, names: as in `call`.

    Returns:
        The arrays at `results`: those that were given, or those that JAX made of them.

    Raises:
        Error: as the library says.
    """
    stream, kind = where
    if kind.through_dlpack:
        if kind.launches:
            from ._jax import launch

            return launch(function, leading, layout, arrays, results, names)
        call_exported(function, (*leading, stream), layout, arrays, results, names, stream)
        return arrays[results.start : results.stop]
    try:
        function(*leading, stream, 0, layout, *arrays)
        return arrays[results.start : results.stop]
    except Error as error:
        raise error.with_traceback(None) from None
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass  # as in `call`
    stream = kind.address(stream, arrays)
    call_exported(function, (*leading, stream), layout, arrays, results, names, stream)
    return arrays[results.start : results.stop]
