# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""JAX arrays on a GPU: the library runs on the stream that JAX lends, and nobody waits for it.

JAX has no current stream to ask for. But whoever imports an array into JAX is told a stream, and
JAX takes what is enqueued there as the work that makes the array ready. So the results are memory
that JAX allocates, and the call is made while JAX imports the first of them: its __dlpack__ lets
JAX order the inputs before the lent stream, runs the library on it, and hands the memory over. Each
further result orders its own lent stream behind the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ._library import Function, call_exported
from .arrays import LEGACY_DEFAULT_STREAM

Array = Any


class _Result:
    """One result on its way into JAX; `enqueue` is told the stream that JAX lends for it."""

    def __init__(self, memory: Array, enqueue: Any) -> None:
        self.memory = memory
        self.enqueue = enqueue

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        stream = LEGACY_DEFAULT_STREAM if stream is None else stream
        self.enqueue(stream)
        return self.memory.__dlpack__(stream=stream, **options)


def launch(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Array, ...],
    results: range,
    names: Sequence[str],
) -> tuple[Array, ...]:
    """As `_library.run`, for arrays of JAX.

    Raises:
        Error: as the library says.
    """
    made: dict[int, Array] = {}

    def first(stream: int) -> None:
        call_exported(function, (*leading, stream), layout, arrays, results, names, stream)

    def behind_first(stream: int) -> None:
        next(iter(made.values())).__dlpack__(stream=stream)

    from_dlpack = sys.modules["jax"].dlpack.from_dlpack
    for place in results:
        if arrays[place] is not None:
            enqueue = behind_first if made else first
            made[place] = from_dlpack(_Result(arrays[place], enqueue))
    return tuple(made.get(place) for place in results)
