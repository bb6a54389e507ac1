# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Owners of GPU memory for the cases: PyTorch, CuPy and JAX, whichever is there; the emulator.

Each makes arrays from NumPy's, keeps strides where it has them, and runs on a stream of its own
(PyTorch and CuPy: a new one; JAX: whatever it lends). Memory for results is full of NaN before the
library gets it. Called by placement.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from .arrays import Array, dtype_of
from .emulator import Emulated
from .placement import OnGpu


class Torch:
    """PyTorch tensors. torch.empty fills what it gives with NaN in this mode of PyTorch."""

    name = "torch"
    has_strides = True

    def __init__(self, device: str = "cuda") -> None:
        """On a device, by PyTorch's name for it."""
        torch = import_module("torch")
        self.torch: Any = torch
        self.device = device
        self.queue = torch.cuda.Stream() if device.startswith("cuda") else None
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)

    def stream(self) -> Any:
        """A context in which calls go to this owner's stream."""
        return self.torch.cuda.stream(self.queue) if self.queue else nullcontext()

    def _dtype(self, dtype: np.dtype[Any]) -> Any:
        return getattr(self.torch, dtype.name)

    def bytes(self, x: Array, first: int) -> Any:
        """A vector of bytes with x from its element `first` on."""
        made = self.torch.empty(first + x.nbytes, dtype=self.torch.uint8, device=self.device)
        made[first:].copy_(self.torch.from_numpy(x if x.flags.writeable else x.copy()))
        return made

    def view(self, memory: Any, offset: int, like: Array) -> Any:
        """The array with the dtype, shape and strides of `like` at a byte offset."""
        size = like.dtype.itemsize
        typed = memory[offset % size :]
        typed = typed[: typed.numel() // size * size].view(self._dtype(like.dtype))
        return typed.as_strided(like.shape, [s // size for s in like.strides], offset // size)

    def contiguous(self, x: Array) -> Any:
        """A copy without gaps."""
        flat = self.bytes(np.array(x, order="C").reshape(-1).view(np.uint8), 0)
        return flat.view(self._dtype(x.dtype)).reshape(x.shape)

    def scattered(self, x: Array) -> Any:
        """A copy with the same strides, and NaN between."""
        steps = [s // x.dtype.itemsize for s in x.strides]
        span = sum((n - 1) * s for n, s in zip(x.shape, steps)) + 1
        made = self.torch.empty(span, dtype=self._dtype(x.dtype), device=self.device)
        view = made.as_strided(x.shape, steps)
        view.copy_(self.contiguous(x))
        return view

    def free_bytes(self) -> int:
        """Of the GPU's memory, what no process has."""
        free: int = self.torch.cuda.mem_get_info()[0]
        return free

    def release(self) -> None:
        """Gives memory that no array has back to the GPU."""
        self.torch.cuda.empty_cache()

    def get(self, x: Any) -> Array:
        """A NumPy copy, after all work on the stream."""
        host = x.detach().contiguous().cpu()
        name = str(host.dtype).removeprefix("torch.")
        if name == "bfloat16" or name.startswith("float8"):  # those that NumPy has not
            bits = self.torch.uint8 if host.itemsize == 1 else self.torch.int16
            return np.array(host.view(bits).numpy().view(dtype_of(name)))
        return np.array(host.numpy())


class Cupy:
    """CuPy arrays. Its allocator is asked to fill what it gives with the bytes of a NaN."""

    name = "cupy"
    has_strides = True

    def __init__(self) -> None:
        """On the current device."""
        import cupy

        self.cupy = cupy
        self.queue = cupy.cuda.Stream(non_blocking=True)
        pool = cupy.get_default_memory_pool()

        def filled(size: int) -> Any:
            memory = pool.malloc(size)
            if size:
                memory.memset_async(0xFF, size, cupy.cuda.get_current_stream())
            return memory

        cupy.cuda.set_allocator(filled)
        self.pool = pool

    def free_bytes(self) -> int:
        """Of the GPU's memory, what no process has."""
        return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def release(self) -> None:
        """Gives memory that no array has back to the GPU."""
        self.pool.free_all_blocks()

    def stream(self) -> Any:
        """A context in which calls go to this owner's stream."""
        return self.queue

    def bytes(self, x: Array, first: int) -> Any:
        """A vector of bytes with x from its element `first` on."""
        made = self.cupy.empty(first + x.nbytes, np.uint8)
        made[first:] = self.cupy.asarray(x)
        return made

    def view(self, memory: Any, offset: int, like: Array) -> Any:
        """The array with the dtype, shape and strides of `like` at a byte offset."""
        return self.cupy.ndarray(like.shape, like.dtype, memory.data + offset, like.strides)

    def contiguous(self, x: Array) -> Any:
        """A copy without gaps."""
        flat = self.bytes(np.array(x, order="C").reshape(-1).view(np.uint8), 0)
        return self.cupy.ndarray(x.shape, x.dtype, flat.data)

    def scattered(self, x: Array) -> Any:
        """A copy with the same strides, and NaN between."""
        span = sum((n - 1) * s for n, s in zip(x.shape, x.strides)) + x.dtype.itemsize
        view = self.view(self.cupy.empty(span, np.uint8), 0, x)
        view[...] = self.contiguous(x)
        return view

    def get(self, x: Any) -> Array:
        """A NumPy copy, after all work on the stream."""
        self.queue.synchronize()
        return np.array(self.cupy.asnumpy(x))


class Jax:
    """JAX arrays, which have no strides and cannot be written to: no `out`."""

    name = "jax"
    has_strides = False

    def __init__(self) -> None:
        """On the first GPU. RuntimeError: a build of JAX without one."""
        import jax

        jax.config.update("jax_enable_x64", True)
        self.jax = jax
        self.device = jax.devices("gpu")[0]

    def stream(self) -> Any:
        """JAX lends the stream itself."""
        return nullcontext()

    def contiguous(self, x: Array) -> Any:
        """A copy without gaps."""
        return self.jax.device_put(np.array(x, order="C"), self.device)

    def get(self, x: Any) -> Array:
        """A NumPy copy."""
        return np.array(x)


PACKAGES = {owner.name: owner for owner in (Torch, Cupy, Jax)}
OWNERS = {**PACKAGES, Emulated.name: Emulated}


@lru_cache(maxsize=4)
def owner(name: str) -> Any:
    """The owner with this name; it lives as long as the process."""
    return OWNERS[name]()


def placed(name: str) -> OnGpu:
    """The public functions on arrays of this owner."""
    return OnGpu(owner(name))


def available() -> list[str]:
    """Which owners are installed; whether they see a GPU shows when they are made."""
    return [name for name in PACKAGES if find_spec(name) is not None]


def release(name: str) -> None:
    """Gives memory that no array of an owner has back to the GPU; JAX does so itself, or not."""
    if name in PACKAGES and owner(name).has_strides:
        owner(name).release()


def is_lost(name: str) -> bool:
    """Whether a kernel broke the GPU's context of this process: every later call would fail."""
    if name not in PACKAGES:
        return False
    try:
        return bool((owner(name).get(owner(name).contiguous(np.ones(1))) != 1).any())
    except Exception:  # each owner has errors of its own
        return True
