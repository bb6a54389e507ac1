# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""GPU kernels before they are needed: compiled into the cache, or into a file for other machines.

A problem is a mapping of the arguments of `fulmen.attention_forward`, and `need` for gradients. Its
arrays may be shapes: {"q": (1, 8, 4096, 64), "k": ..., "v": ..., "dtype": "bfloat16"}, with
"kv_dtype" where k and v are quantised. A config of a kernel depends on no length: one problem of a
kind stands for all lengths of it. Kernels of `fulmen.append_kv` are in bundles of problems over
caches; a call whose slots are all -1 compiles one and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import fulmen

from ._library import library, raised_by
from .errors import ArgumentError, DTypeError, Error, one_of, shown, text, whole, words
from .options import names_of

Progress = Callable[[int, int], object]  # (done, total)
ARRAYS = ("q", "k", "v")
MOST_THREADS = 16


def warmup(
    problems: Iterable[Mapping[str, Any]],
    *,
    device: int | None = None,
    progress: Progress | None = None,
    threads: int = 0,
) -> None:
    """Compiles and loads the kernels of problems, many at once, so that no later call has to.

    Args:
        problems: mappings of the arguments of `fulmen.attention_forward`: q, k, v as arrays, or as
            shapes with "dtype" and "kv_dtype"; options; and "need" for gradients, as in
            `fulmen.plan`.
        device: CUDA's number of the GPU for problems given as shapes; None: 0, unless the problem
            says backend="cpu". Arrays on a GPU say it themselves.
        progress: called with (done, total) after each problem, in this thread.
        threads: how many compile at once; 0: as many as cores, at most 16.

    Raises:
        fulmen.Error: the first that a problem met; the others have been compiled.

    >>> import fulmen
    >>> shape = (1, 2, 64, 32)
    >>> fulmen.warmup([{"q": shape, "k": shape, "v": shape, "dtype": "float32", "backend": "cpu"}])
    """
    asked = [_arguments(problem, device, None) for problem in _listed(problems)]
    _plans(asked, progress, threads)


def cache_clear() -> None:
    """Removes every compiled GPU kernel, from the cache folder and from memory.

    Plans stay valid; later calls compile anew.

    >>> import fulmen
    >>> fulmen.cache_clear()
    """
    library().cache_clear()


def compile_bundle(
    problems: Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    archs: Sequence[str],
    progress: Progress | None = None,
    threads: int = 0,
) -> int:
    """Compiles the kernels of problems into one file, without a GPU.

    Machines without NVRTC run them after `fulmen.load_bundle`, or with FULMEN_BUNDLE.

    Args:
        problems: as in `fulmen.warmup`.
        path: the file; an old one is replaced.
        archs: GPUs or architectures: "sm_90a", "a100", ...
        progress, threads: as in `fulmen.warmup`.

    Returns:
        The number of plans whose kernels it holds.

    Raises:
        fulmen.Error: a problem cannot be planned or compiled for one of them.
    """
    names = words("archs", archs, "('sm_90a', 'a100')")
    if not names:
        raise ArgumentError("archs is empty; name at least one, such as 'sm_90a'")
    file = _path(path)
    every = _listed(problems)
    asked = [_arguments(problem, None, arch) for arch in names for problem in every]
    if not asked:
        raise ArgumentError("problems is empty; a bundle holds the kernels of at least one")
    plans = _plans(asked, progress, threads)
    handles = [handle for made in plans for handle in made.handles]
    _told(library().bundle_write, file, *handles)
    return len(handles)


def load_bundle(path: str | os.PathLike[str]) -> None:
    """Uses a file of `fulmen.compile_bundle` from now on, before the cache and NVRTC.

    Raises:
        fulmen.Error: there is no such file, or another version of fulmen made it.
    """
    _told(library().bundle_load, _path(path))


def _told(function: Callable[..., int], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Error as error:
        raise raised_by(error) from None


def _path(path: Any) -> str:
    try:
        return text("path", os.fspath(path), "kernels.bundle")
    except TypeError:
        raise DTypeError(f"path is {shown(path)}; the path of a file is expected") from None


def _listed(problems: Any) -> list[Mapping[str, Any]]:
    """The problems, each a mapping by words."""
    try:
        every = list(problems)
    except Exception:  # an iterator of the caller's may raise anything
        raise DTypeError(f"problems is {shown(problems)}; a list of mappings is expected") from None
    for problem in every:
        if not isinstance(problem, Mapping) or not all(isinstance(x, str) for x in problem):
            raise DTypeError(f"a problem is {shown(problem)}; a mapping of arguments is expected")
    return every


def _arguments(problem: Mapping[str, Any], device: int | None, name: str | None) -> dict[str, Any]:
    """The arguments of `fulmen.plan` for a problem."""
    from .array_types import named_dtype
    from .layouts import phantom

    arguments = {"need": (), **problem}
    missing = [name for name in ARRAYS if name not in arguments]
    if missing:
        raise ArgumentError(f"a problem has q, k and v; this one lacks {' and '.join(missing)}")
    are_shapes = all(isinstance(arguments[name], (tuple, list)) for name in ARRAYS)
    dtype = text("dtype", arguments.pop("dtype", "float32"), "bfloat16")
    kv_dtype = text("kv_dtype", arguments.pop("kv_dtype", dtype), "float8_e4m3fn")
    if are_shapes:
        dtypes = [named_dtype(name) for name in (dtype, kv_dtype, kv_dtype)]
        shapes = [tuple(arguments[name]) for name in ARRAYS]
        arguments.update(zip(ARRAYS, map(phantom, shapes, dtypes)))
        backend = one_of("backend", arguments.get("backend", "auto"), names_of("backend"))
        if name is None and backend != "cpu":
            arguments["device"] = 0 if device is None else device
    if name is not None:
        arguments["device_name"] = name
    return arguments


def _plans(asked: list[dict[str, Any]], progress: Progress | None, threads: int) -> list[Any]:
    """Plans of all, made by several threads; the compiler runs without the interpreter lock."""
    workers = whole("threads", threads, 0, 2**16) or min(os.cpu_count() or 1, MOST_THREADS)
    failed: Error | None = None
    plans: dict[int, fulmen.Plan] = {}
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(fulmen.plan, **arguments): i for i, arguments in enumerate(asked)}
        for done, future in enumerate(as_completed(futures), 1):
            try:
                plans[futures[future]] = future.result()
            except Error as error:
                failed = failed or error
            if progress is not None:
                progress(done, len(asked))
    if failed is not None:
        raise failed
    return [plans[index] for index in sorted(plans)]
