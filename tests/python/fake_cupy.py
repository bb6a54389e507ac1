# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A cupy that is none, over the fake driver of tests/gpu: arrays on a device that is not there.

`install()` puts it where `import cupy` finds it. Its arrays have DLPack of CUDA's device type and
remember the stream that each export was asked for. Used by the scripts of test_gpu.py, in processes
whose library path holds the fake driver.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

KDL_CUDA = 2
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num", ctypes.c_uint),
    )  # fmt: skip


class Launch(ctypes.Structure):
    """FakeLaunch of fake_driver.h: what these tests read of it, and room for the rest."""

    _fields_ = (("config", LaunchConfig), ("device", ctypes.c_int), ("rest", ctypes.c_byte * 512))


driver = ctypes.CDLL("libcuda.so.1")
driver.fake_launch.restype = Launch
for name in ("cuMemAlloc_v2", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"):
    getattr(driver, name).restype = ctypes.c_int
kept: list[Any] = []  # exports live as long as the process


def launches() -> list[tuple[int, int]]:
    """(device, stream) of every launch so far."""
    found = (driver.fake_launch(i) for i in range(driver.fake_num_launches()))
    return [(launch.device, launch.config.stream or 0) for launch in found]


def allocate(num_bytes: int, device: int) -> int:
    """Memory of a device."""
    context, popped, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxPushCurrent_v2(context)
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)) == 0
    driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
    return pointer.value


class Device:
    """The current device is a global, as in CuPy."""

    current = 0

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.id

    def __exit__(self, *_: Any) -> None:
        Device.current = self.before


class Stream:
    """A stream by its address."""

    current = 0

    def __init__(self, ptr: int, device: int = 0) -> None:
        self.ptr = ptr

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self.ptr

    def __exit__(self, *_: Any) -> None:
        Stream.current = self.before


class ndarray:  # noqa: N801  CuPy's name
    """Contiguous memory of a device; made on the current stream."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.size = int(np.prod(self.shape))
        self.device = Device(Device.current)
        self.pointer = allocate(max(self.size * self.dtype.itemsize, 1), self.device.id)
        self.made_on = Stream.current
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, self.device.id

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed = Managed(
            DLTensor(
                self.pointer, KDL_CUDA, self.device.id, len(self.shape),
                4 if self.dtype.name == "bfloat16" else CODES[self.dtype.kind],
                8 * self.dtype.itemsize, 1, shape, None, 0,
            ),
            None, Deleter(lambda _: None),
        )  # fmt: skip
        kept.append((managed, shape))
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(managed), b"dltensor", None)

    def numpy(self) -> Any:
        """The memory itself: that of the fake driver is the host's."""
        raw = (ctypes.c_byte * (self.size * self.dtype.itemsize)).from_address(self.pointer)
        return np.frombuffer(raw, self.dtype).reshape(self.shape)

    def get(self) -> Any:
        """A copy in host memory."""
        return self.numpy().copy()


def asarray(x: Any) -> ndarray:
    """A copy on the current device."""
    made = ndarray(np.shape(x), np.asarray(x).dtype)
    if made.size:
        made.numpy()[...] = x
    return made


def install() -> ModuleType:
    """Makes this the module cupy."""
    module = ModuleType("cupy")
    module.__dict__.update(
        ndarray=ndarray, asarray=asarray, empty=ndarray,
        cuda=SimpleNamespace(
            Device=Device, Stream=Stream, ExternalStream=Stream,
            get_current_stream=lambda device: Stream(Stream.current),
        ),
    )  # fmt: skip
    sys.modules["cupy"] = module
    return module
