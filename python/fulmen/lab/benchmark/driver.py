# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A kernel in PTX that the CUDA driver compiles and launches: what a card can do at most."""

from __future__ import annotations

import ctypes
from typing import Any

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """One entry of a module on torch's current device."""

    def __init__(self, torch: Any, source: str, name: str, shared: int = 0) -> None:
        """Compiled for a device whose context torch has made current; with dynamic shared bytes.

        Raises:
            RuntimeError: the driver does not take the kernel.
        """
        self._torch = torch
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._shared = shared
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), source.encode())
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, name.encode())
        if shared:
            self._call("cuFuncSetAttribute", self._kernel, MAX_DYNAMIC_SHARED, shared)

    def launch(self, blocks: int, threads: int, values: tuple[Any, ...]) -> None:
        """Enqueues it on torch's current stream; values are ctypes in the order of parameters."""
        stream = ctypes.c_void_p(self._torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        shape = map(ctypes.c_uint, (blocks, 1, 1, threads, 1, 1, self._shared))
        self._call("cuLaunchKernel", self._kernel, *shape, stream, pointers, None)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")
