# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds libfulmen, loads it once, and reads what it says of its options and arrays.

The library speaks the C calling convention of apache-tvm-ffi (src/ffi). FULMEN_LIBRARY names
another build of it; otherwise it is the one beside this package. Its schema is the one list of
options and arrays: nothing in Python knows a position.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Callable

from .errors import STATUS_ERRORS, Error, LibraryNotFound

Function = Callable[..., int]

_VERBS = (
    *("forward", "backward", "explain", "dense_mask", "merge", "build_info", "schema"),
    *("plan_create", "plan_destroy", "plan_workspace_bytes", "plan_explain"),
    *("plan_forward", "plan_backward"),
)
_RARE_VERBS = (  # looked up when they are first asked for
    *("gpu_info", "set_nvrtc_candidates", "cache_clear", "device_faults"),
    *("bundle_write", "bundle_load", "append_kv", "rotary", "mla_indexer", "cpu_run_loop"),
    "quantise",
    *("expression_create", "block_map"),
    *("keep_options", "add_torch_kernels", "raise_refusal"),
)


class Library:
    """The exports of src/ffi/exports.cpp by name; each takes its arguments by position."""

    __slots__ = (*_VERBS, *_RARE_VERBS, "_module", "path")

    _module: Any

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
    schema: Function
    dense_mask: Function
    merge: Function
    append_kv: Function
    rotary: Function
    mla_indexer: Function
    quantise: Function
    gpu_info: Function
    set_nvrtc_candidates: Function
    cache_clear: Function
    bundle_write: Function
    bundle_load: Function
    device_faults: Function
    cpu_run_loop: Function
    expression_create: Function
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


class Schema:
    """What fulmen_schema() says: the options of a call and its arrays.

    Attributes:
        template: the bytes of a fulmen_problem with every default.
        options: by name; type, offset, default, kind and what is allowed of each.
        arrays: by name; axes, type, role and what else the table says of each.
        array_names: every array of a call, in the order in which calls pass them: inputs, results
            of the forward pass, what comes into the backward pass, gradients.
        inputs: the names of the inputs, q, k and v first.
        integer_inputs: those that hold lengths, offsets, ids, pages and words.
        quantised: the names of the dtypes that only queries, keys and values may have.
        scales: those that arrays of 8 bits are multiplied by, which may be numbers.
        forward_only: the inputs with one of which a call has no backward pass: those of caches, and
            scales.
        results, gradients: where what a forward and a backward call write is in `array_names`.
        differentiable: the index of each input that has a gradient.
        replaceable: the index of each input that a run of a plan may bring anew, by name.
    """

    def __init__(self, said: dict[str, Any]) -> None:
        """From the JSON object."""
        arrays = said["arrays"]
        roles = [array["role"] for array in arrays]
        self.template = bytes.fromhex(said["problem"])
        self.options: dict[str, dict[str, Any]] = {x["name"]: x for x in said["options"]}
        self.dtypes: list[dict[str, Any]] = said["dtypes"]
        self.implementations: list[dict[str, Any]] = said["implementations"]
        self.optimisations: tuple[str, ...] = tuple(said["optimisations"])
        self.arrays: dict[str, dict[str, Any]] = {x["word"]: x for x in arrays}
        self.array_names: tuple[str, ...] = tuple(array["word"] for array in arrays)
        num_inputs = roles.count("input")
        inputs = arrays[:num_inputs]
        self.inputs = self.array_names[:num_inputs]
        self.integer_inputs = tuple(
            x["word"] for x in inputs if x["dtypes"] in ("index", "int64") and x["word"] != "rng"
        )
        self.quantised = tuple(x["name"] for x in self.dtypes if x["kind"] == "quantised")
        self.scales = tuple(x["word"] for x in inputs if x["dtypes"] == "float32")
        self.forward_only = tuple(x["word"] for x in inputs if x["forward_only"])
        self.results = range(num_inputs, num_inputs + roles.count("result"))
        self.gradients = range(roles.index("gradient"), len(roles))
        self.differentiable = tuple(i for i, x in enumerate(inputs) if x["differentiable"])
        self.replaceable = {x["word"]: i for i, x in enumerate(inputs) if x["replaceable"]}

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that a call may leave out: all but q, k and v."""
        return tuple(name for name in self.inputs if name not in ("q", "k", "v"))

    @property
    def differentiable_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that have a gradient, in the order of the gradients."""
        return tuple(self.inputs[index] for index in self.differentiable)


_loaded: Library | None = None
_lock = threading.RLock()


def library() -> Library:
    """The library, loaded at the first call."""
    return _loaded or _load()


@lru_cache(maxsize=1)
def schema() -> Schema:
    """What the library says of options and arrays."""
    return Schema(json.loads(text_of(library().schema)))


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

    That import takes a second, and a program that does not use torch has not asked for it: one that
    does has imported it before, and its tensors are read through DLPack in either order.
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
        for status, error_type in STATUS_ERRORS.items():
            tvm_ffi.register_error(status, error_type)
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


@cache
def expression_number(
    score: str | None, mask: str | None, captures: tuple[str, ...], scalars: tuple[str, ...]
) -> int:
    """The number of a score and a mask as texts, which are kept for the life of the process.

    Args:
        score, mask: in the language of fulmen.h, section 6.
        captures, scalars: the names of the arrays and of the numbers that they read.

    Raises:
        Error: a text is not in the language.
    """
    try:
        made = library().expression_create(score, mask, ",".join(captures), ",".join(scalars))
    except Error as error:
        raise raised_by(error) from None
    number = int(made) % 2**64
    _captures[number] = captures
    return number


_captures: dict[int, tuple[str, ...]] = {}


def captures_of(number: int) -> tuple[str, ...]:
    """The names of the arrays that an expression of this process reads, in their order."""
    return _captures.get(number, ())


def raised_by(error: Error) -> Error:
    """The error of the library without the frames in between, to be raised `from None`.

    What it quotes of the caller's, a path say, does nothing to a terminal.
    """
    text = str(error)
    if not text.isprintable():
        error.args = ("".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in text),)
    return error.with_traceback(None)


# NVRTC, the compiler of GPU kernels: where pip has put it is told to the library, which opens one.
# Nothing is imported and nothing opened to find it. Below a folder of sys.path; CUDA 13's packages
# share a folder, those before have their own, PyTorch brings it along.
NVRTC_FOLDERS = (
    *(f"nvidia/{name}/lib" for name in ("cu14", "cu13", "cuda_nvrtc")),
    *(f"nvidia/{name}/bin" for name in ("cu13", "cuda_nvrtc")),
    "torch/lib",
)
_announced = False


def nvrtc_candidates() -> list[str]:
    """Files that look like NVRTC, in the order of sys.path, newest first in each folder."""
    found: list[str] = []
    for entry in dict.fromkeys(sys.path):
        for folder in NVRTC_FOLDERS:
            found += sorted(_compilers(os.path.join(entry or os.curdir, folder)), reverse=True)
    return found


def _compilers(folder: str) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        is_compiler = name.startswith(("libnvrtc.so", "libnvrtc-", "nvrtc64_"))
        if is_compiler and "builtins" not in name and ".alt." not in name:
            yield os.path.join(folder, name)


def announce_nvrtc() -> None:
    """Tells the library the candidates, once for the process: when a call has to do with a GPU."""
    global _announced  # noqa: PLW0603  told once
    if _announced:
        return
    with _lock:
        if not _announced:
            library().set_nvrtc_candidates("\0".join(nvrtc_candidates()).encode())
            _announced = True
