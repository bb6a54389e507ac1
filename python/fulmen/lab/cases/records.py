# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Records of latent attention: bytes of a cache's rows, and the numbers that they stand for.

The oracle knows nothing of them: the problem has the values, exact in float64. A row of 656 bytes
has 512 e4m3, a float32 for each 128 of them (here any number, as caches of other libraries have
them) and 64 bfloat16. One of 584 has 448 e4m3, 64 bfloat16, and a power of two for each 64, which
lie behind all rows of the page. Called by problem and pages.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .arrays import Array

LAYOUTS = {656: (576, 128), 584: (512, 64)}  # bytes: numbers of a row, of a group
ROTARY = 64
UNUSED = 0xFF  # NaN in all that a record holds


def record(x: Array, size: int, by_append: bool = False) -> tuple[Array, Array]:
    """Bytes (.., size) and values (.., dims) of numbers (.., dims); of 584 the scales come last.

    by_append: scales as append_kv chooses them: powers of two from 2^-13 on.
    """
    dims, group = LAYOUTS[size]
    groups = x[..., : dims - ROTARY].reshape(*x.shape[:-1], -1, group)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    if by_append:
        scale = np.maximum(largest / 448, 1e-4).astype(np.float32)
    else:
        scale = np.where(largest > 0, largest / 448, 1.0).astype(np.float32)
    if size == 584 or by_append:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    stored = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    rotary = np.ascontiguousarray(x[..., dims - ROTARY :].astype(ml_dtypes.bfloat16))
    values = stored.astype(np.float64) * scale.astype(np.float64)
    flat = (*x.shape[:-1], -1)
    parts = [stored.view(np.uint8).reshape(flat), rotary.view(np.uint8).reshape(flat)]
    if size == 656:
        parts.insert(1, np.ascontiguousarray(scale[..., 0]).view(np.uint8).reshape(flat))
    else:
        exponents = (np.log2(scale[..., 0]) + 127).astype(np.uint8)
        parts += [exponents, np.full((*x.shape[:-1], 1), UNUSED, np.uint8)]
    numbers = np.concatenate([values.reshape(flat), rotary.astype(np.float64)], axis=-1)
    return np.concatenate(parts, axis=-1), numbers


def appended(x: Array, size: int) -> tuple[Array, Array]:
    """Numbers near x that append_kv stores as they are: the bytes that it writes, and the values.

    Rounded twice: a largest number that became half of 448 has a smaller scale the next time.
    """
    return record(record(x, size, by_append=True)[1], size, by_append=True)


def turned(rows: Array, last: Array) -> Array:
    """The same records (.., size) with other last numbers (.., 64)."""
    size = rows.shape[-1]
    numbers = np.ascontiguousarray(last.astype(ml_dtypes.bfloat16))
    begin = 528 if size == 656 else 448
    found: Array = rows.copy()
    found[..., begin : begin + 2 * ROTARY] = numbers.view(np.uint8).reshape(*rows.shape[:-1], -1)
    return found


def put(page: Array, row: int, one: Array) -> None:
    """Writes a record into a page (rows, size)."""
    rows, size = page.shape
    if size == 656:
        page[row] = one
        return
    flat = page.reshape(-1)
    flat[row * 576 : (row + 1) * 576] = one[:576]
    flat[rows * 576 + row * 8 : rows * 576 + (row + 1) * 8] = one[576:]
