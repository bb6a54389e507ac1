# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A GPU that is none: the kernels' own text on the CPU, under a checker and with counters.

FULMEN_EMULATOR names libfulmen_emulated_gpu.so (tests/emulator/gpu), which answers as the CUDA
driver and as NVRTC. `start` puts it in their place for the whole process, before either is first
asked for. Its memory is the host's, so its arrays are NumPy's with another name for where they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from fulmen import array_types
from fulmen.errors import Error

from ..gpu_memory import DeviceArray, DeviceType
from .arrays import Array
from .case import Case

VARIABLE = "FULMEN_EMULATOR"
ADVICE = (
    "build it with `cmake --preset release && cmake --build --preset release --target "
    f"fulmen_emulated_gpu` and let {VARIABLE} name libfulmen_emulated_gpu.so"
)
MOST_ROWS = 300
MOST_PRODUCTS = 1 << 24  # of one case: pairs of rows, heads and dims


class NoEmulatorError(Error):
    """There is no emulator to run on."""


@lru_cache(maxsize=1)
def start() -> Any:
    """The library; it is the driver and the compiler of this process from now on.

    Raises:
        NoEmulatorError: FULMEN_EMULATOR names none.
    """
    path = os.environ.get(VARIABLE, "")
    if not os.path.isfile(path):
        raise NoEmulatorError(f"{VARIABLE} is {path!r}, which is no file; {ADVICE}")
    os.environ["FULMEN_NVRTC"] = path
    os.environ["FULMEN_CACHE_LIMIT"] = "0"  # it keeps its own code
    loaded = ctypes.CDLL(path)  # named libcuda.so.1 within: fulmen finds it loaded
    loaded.fulmen_emulator_allocate.restype = ctypes.c_void_p
    loaded.fulmen_emulator_allocate.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    loaded.fulmen_emulator_release.argtypes = (ctypes.c_void_p,)
    loaded.fulmen_emulator_counted.restype = ctypes.c_char_p
    array_types._TYPES[EmulatedArray] = EmulatedType
    return loaded


def beyond(case: Case) -> str:
    """Why a case is not for the emulator; "" where it is."""
    products = case.batch * case.heads * case.q_rows * case.kv_rows * max(case.dim, case.dim_v)
    if max(case.q_rows, case.kv_rows) > MOST_ROWS or products * max(case.repeat, 1) > MOST_PRODUCTS:
        return f"more than {MOST_ROWS} rows or {MOST_PRODUCTS} products take the emulator long"
    if case.pool == "far" or any(how.startswith("far") for _, how in case.views):
        return "arrays over gigabytes are more than the emulator watches"
    return ""


class EmulatedArray(DeviceArray):
    """An array in the memory of the emulated GPU."""

    def __init__(self, host: Array) -> None:
        """The same memory as `host`, which lies in memory of `empty`."""
        super().__init__(host, host.ctypes.data)
        self.host = host


def empty(shape: Any, dtype: Any, name: str = "array") -> EmulatedArray:
    """Memory of the emulated GPU, full of NaN; the checker calls it by name."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    address = start().fulmen_emulator_allocate(name.encode(), max(size, 1))
    raw = (ctypes.c_byte * max(size, 1)).from_address(address)
    weakref.finalize(raw, start().fulmen_emulator_release, address)
    return EmulatedArray(np.frombuffer(raw, np.uint8)[:size].view(dtype).reshape(shape))


def copied(x: Array, name: str = "array") -> EmulatedArray:
    """A copy without gaps."""
    made = empty(x.shape, x.dtype, name)
    made.host[...] = x
    return made


class EmulatedType(DeviceType):
    """How fulmen makes results beside an EmulatedArray."""

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Any) -> Any:
        return empty(shape, dtype)

    @staticmethod
    def scratch(num_bytes: int, like: Any) -> Any:
        return empty(num_bytes, np.uint8)

    @staticmethod
    def moved(x: Any, like: Any) -> Any:
        return copied(np.asarray(x))


class Emulated:
    """The owner of the emulator's memory: gpu_arrays."""

    name = "emulated"
    has_strides = True

    def __init__(self) -> None:
        """Starts the emulator."""
        start()

    def stream(self) -> Any:
        """Everything is done when a call returns."""
        return nullcontext()

    def bytes(self, x: Array, first: int) -> Any:
        """A vector of bytes with x from its element `first` on."""
        made = empty(first + x.nbytes, np.uint8)
        made.host[first:] = x
        return made

    def view(self, memory: Any, offset: int, like: Array) -> Any:
        """The array with the dtype, shape and strides of `like` at a byte offset."""
        return EmulatedArray(np.ndarray(like.shape, like.dtype, memory.host, offset, like.strides))

    def contiguous(self, x: Array) -> Any:
        """A copy without gaps."""
        return copied(x)

    def scattered(self, x: Array) -> Any:
        """A copy with the same strides, and NaN between."""
        span = sum((n - 1) * s for n, s in zip(x.shape, x.strides)) + x.dtype.itemsize
        made = self.view(empty(span, np.uint8), 0, x)
        made.host[...] = x
        return made

    def get(self, x: Any) -> Array:
        """A NumPy copy."""
        return np.array(x.host)


def counted(call: Any) -> tuple[Any, dict[str, Any]]:
    """What `call()` returns, and what its kernels did."""
    library = start()
    library.fulmen_emulator_count(1)
    try:
        result = call()
        return result, json.loads(library.fulmen_emulator_counted())
    finally:
        library.fulmen_emulator_count(0)
