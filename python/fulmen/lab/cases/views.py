# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The same numbers in other memory: strides, offsets, gaps and guards around a tensor.

A view has the shape and the numbers of its source and other bytes around and between them. Every
gap holds NaN, so that a read outside the tensor shows. Axes are (..., head, row, dim), or (row,
head, dim) for packed tensors, whose axes are swapped before and after.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Array, unused

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: address space without a claim to memory


def _buffer(elements: int, dtype: np.dtype[Any]) -> Array:
    return np.full(elements, unused(dtype), dtype)


def contiguous(x: Array) -> Array:
    """Rows one after the other, in memory of its own."""
    return np.array(x, order="C")


def rows_first(x: Array) -> Array:
    """(batch, row, head, dim) in memory."""
    return np.array(x.swapaxes(-3, -2), order="C").swapaxes(-3, -2)


def dims_first(x: Array) -> Array:
    """(..., dim, row) in memory: the dimension has a stride, the row has none."""
    return np.array(x.swapaxes(-1, -2), order="C").swapaxes(-1, -2)


def stepped(x: Array) -> Array:
    """Every third element of the dimension; NaN between."""
    buffer = _buffer(int(np.prod((*x.shape[:-1], 3 * x.shape[-1]))), x.dtype)
    view = buffer.reshape((*x.shape[:-1], 3 * x.shape[-1]))[..., ::3]
    view[...] = x
    return view


def gapped(x: Array) -> Array:
    """Rows 5 elements further apart than their length, planes 7 rows; NaN between."""
    shape = (*x.shape[:-2], x.shape[-2] + 7, x.shape[-1] + 5)
    view = _buffer(int(np.prod(shape)), x.dtype).reshape(shape)
    view = view[..., 2 : 2 + x.shape[-2], 1 : 1 + x.shape[-1]]
    view[...] = x
    return view


def offset(elements: int) -> Callable[[Array], Array]:
    """Contiguous, but this many elements behind an aligned address."""

    def view_of(x: Array) -> Array:
        buffer = _buffer(x.size + elements + 64, x.dtype)
        address: int = buffer.__array_interface__["data"][0]
        first = (-address % 64) // x.dtype.itemsize + elements
        view = buffer[first : first + x.size].reshape(x.shape)
        view[...] = x
        return view

    return view_of


def guarded(x: Array) -> Array:
    """Contiguous between two bands of 512 NaN."""
    buffer = _buffer(x.size + 1024, x.dtype)
    view = buffer[512 : 512 + x.size].reshape(x.shape)
    view[...] = x
    return view


def _stride_0(axis: int) -> Callable[[Array], Array]:
    def view_of(x: Array) -> Array:
        first: Array = np.take(x, [0], axis=axis)
        return np.broadcast_to(first, x.shape)

    return view_of


def far(axis: int) -> Callable[[Array], Array]:
    """Steps of 2^30 elements along an axis: products of stride and index pass 2^31.

    The gaps are pages that were never touched: they cost address space and no memory.
    """

    def view_of(x: Array) -> Array:
        strides = np.array(np.ascontiguousarray(x).strides, np.int64)
        strides[axis] = (2**30 + 8) * x.dtype.itemsize
        num_bytes = int(strides[axis]) * (x.shape[axis] - 1) + x.nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
        view = np.ndarray(x.shape, x.dtype, memory.data, 0, tuple(int(s) for s in strides))
        view[...] = x
        return view

    return view_of


def scalar(x: Array) -> Array:
    """One number for the whole tensor: all strides 0."""
    return np.broadcast_to(np.ascontiguousarray(x.reshape(-1)[:1].reshape((1,) * x.ndim)), x.shape)


# Views from "same_..." on change the numbers: what is repeated is the first of its axis.
VIEWS: dict[str, Callable[[Array], Array]] = {
    "contiguous": contiguous,
    "rows_first": rows_first,
    "dims_first": dims_first,
    "stepped": stepped,
    "gapped": gapped,
    "offset_1": offset(1),
    "offset_2": offset(2),
    "offset_3": offset(3),
    "guarded": guarded,
    "far_batch": far(0),
    "far_rows": far(-2),
    "same_batch": _stride_0(0),
    "same_heads": _stride_0(-3),
    "same_rows": _stride_0(-2),
    "same_dims": _stride_0(-1),
    "same_scalar": scalar,
}
