# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arrays in the memory of a GPU through the driver alone, for programs without PyTorch or CuPy.

`fulmen run` copies a file there and the results back. Work goes to the legacy default stream, so
memory that one call gave back may serve the next.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from fulmen import array_types
from fulmen.errors import DeviceError, LibraryNotFound, OutOfMemoryError
from fulmen.layouts import phantom

Array = Any  # of NumPy

CODES = {
    "bfloat16": 4,
    "bool": 6,
    "float8_e4m3fn": 10,
    "float8_e5m2": 12,
}  # of DLPack, where NumPy's own differ or are missing
OUT_OF_MEMORY = 2  # CUresult


class _Tensor(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32), ("rank", ctypes.c_int32), ("code", ctypes.c_uint8),
    )  # fmt: skip


class DeviceArray:
    """An array on CUDA's first device, as DLPack exports it."""

    def __init__(self, like: Array, address: int) -> None:
        """With the dtype, shape and strides of `like`, whose memory is not looked at."""
        self.like = like
        self.address = address
        self.shape = like.shape
        self.dtype = like.dtype
        self.size = like.size
        self.nbytes = like.nbytes

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA's first device."""
        return array_types.GPU_DEVICE_TYPES[0], 0

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """NumPy's capsule with another address, and dtypes that NumPy does not export."""
        code = CODES.get(self.dtype.name)
        plain = self.like if code is None else self.like.view(f"u{self.dtype.itemsize}")
        capsule = plain.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = _Tensor.from_address(get(capsule, b"dltensor"))
        tensor.device_type, tensor.device_index = self.__dlpack_device__()
        tensor.data = self.address
        if code is not None:
            tensor.code = code
        return capsule


class DeviceType(array_types.CupyType):
    """How fulmen makes results beside a DeviceArray."""

    @staticmethod
    def device(x: Any) -> int:
        return 0

    @staticmethod
    def stream(x: Any, asked: Any) -> int:
        return array_types.NO_STREAM if asked is None else array_types.stream_address(asked)

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Any) -> Any:
        return memory().empty(shape, dtype)

    @staticmethod
    def scratch(num_bytes: int, like: Any) -> Any:
        return memory().empty((num_bytes,), np.uint8)

    @staticmethod
    def moved(x: Any, like: Any) -> Any:
        return memory().put(np.asarray(x))

    @staticmethod
    def on(stream: int, like: Any) -> Any:
        return nullcontext()


class GpuMemory:
    """The memory of CUDA's first device, in the context that fulmen uses too."""

    def __init__(self) -> None:
        """Loads the driver.

        Raises:
            LibraryNotFound: there is none.
            DeviceError: it does not start.
        """
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LibraryNotFound(f"the CUDA driver does not load: {error}") from error
        self._free: dict[int, list[int]] = {}  # addresses by the number of bytes
        context = ctypes.c_void_p()
        self._check("cuInit", 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._check("cuCtxPushCurrent_v2", context)
        array_types._TYPES[DeviceArray] = DeviceType

    def _check(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self._driver, function)(*arguments)
        except AttributeError:
            raise DeviceError(f"the CUDA driver has no {function}") from None
        if code == OUT_OF_MEMORY:
            raise OutOfMemoryError(f"the GPU has no memory left ({function})")
        if code != 0:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            raise DeviceError(f"{function} failed: {(name.value or b'').decode() or code}")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Memory for an array without gaps."""
        made = DeviceArray(phantom(tuple(shape), dtype), 0)
        size = max(made.nbytes, 1)
        free = self._free.setdefault(size, [])
        if not free:
            address = ctypes.c_uint64()
            self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            free.append(address.value)
        made.address = free.pop()
        weakref.finalize(made, free.append, made.address)
        return made

    def put(self, x: Array) -> DeviceArray:
        """A copy of a NumPy array without gaps."""
        x = np.ascontiguousarray(x).reshape(x.shape)
        made = self.empty(x.shape, x.dtype)
        if x.nbytes:
            there, here = ctypes.c_uint64(made.address), ctypes.c_void_p(x.ctypes.data)
            self._check("cuMemcpyHtoD_v2", there, here, ctypes.c_size_t(x.nbytes))
        return made

    def get(self, x: DeviceArray) -> Array:
        """A NumPy copy, after all work before."""
        made = np.empty(x.shape, x.dtype)
        if made.nbytes:
            here, there = ctypes.c_void_p(made.ctypes.data), ctypes.c_uint64(x.address)
            self._check("cuMemcpyDtoH_v2", here, there, ctypes.c_size_t(made.nbytes))
        return made

    def wait(self) -> None:
        """Returns when all work is done."""
        self._check("cuCtxSynchronize")


@lru_cache(maxsize=1)
def memory() -> GpuMemory:
    """The one of this process."""
    return GpuMemory()
