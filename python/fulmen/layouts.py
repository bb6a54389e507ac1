# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Layouts: what `layout=` names, the axes of q, k, v, o and their gradients, in order; shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .errors import ArgumentError, DTypeError, ShapeError, one_of, shown, whole

Array = Any


class Layout(NamedTuple):
    """The axes of q, k, v, o and their gradients, in order."""

    name: str
    rank: int
    rows_before_heads: bool

    @property
    def code(self) -> int:
        """As the library reads it."""
        return 2 * self.rank + self.rows_before_heads

    def lse_shape(self, q_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of lse: (batch, head, row) without the axes that the layout leaves out."""
        if self.rows_before_heads:
            return (*q_shape[:-3], q_shape[-2], q_shape[-3])
        return tuple(q_shape[:-1])

    def check(self, x: Array, name: str) -> tuple[int, ...]:
        """The shape of x, which must have the axes of the layout."""
        try:
            shape: tuple[int, ...] = x.shape
            rank = len(shape)
        except (AttributeError, TypeError):
            raise DTypeError(
                f"{name} is {type(x).__name__}, not an array (NumPy, PyTorch, JAX: anything with "
                "DLPack)"
            ) from None
        if rank != self.rank:
            others = [other.name for other in LAYOUTS.values() if other.rank == rank]
            nearest = f": layout={' or '.join(map(repr, others))} has that many" if others else ""
            raise ShapeError(
                f"{name} has {rank} axes {tuple(shape)}; layout={self.name!r} names "
                f"{self.rank}{nearest}"
            )
        return shape

    def check_all(self, q: Array, k: Array, v: Array, page_table: Array = None) -> None:
        """Each of the three must have them; k and v with a page table those of pools."""
        self.check(q, "q")
        of_keys = self if page_table is None else self.of_pools
        for x, name in ((k, "k"), (v, "v")):
            of_keys.check(x, name)

    @property
    def of_pools(self) -> Layout:
        """The axes of pools of pages: (page, head, row, dim), or (page, row, head, dim)."""
        return LAYOUTS["bshd" if self.rows_before_heads else "bhsd"]


LAYOUTS = {
    "bhsd": Layout("bhsd", 4, False),
    "bshd": Layout("bshd", 4, True),
    "hsd": Layout("hsd", 3, False),
    "shd": Layout("shd", 3, True),
    "sd": Layout("sd", 2, False),
}


def layout_of(name: Any, packed: bool = False) -> Layout:
    """The layout with a name; packed sequences have rank 3."""
    name = one_of("layout", name, LAYOUTS)
    if not packed:
        return LAYOUTS[name]
    if name == "bhsd":  # the default: packed sequences are (total, heads, dim)
        name = "shd"
    if LAYOUTS[name].rank != 3:
        raise ArgumentError(
            f"layout is {name!r}; sequences packed by cu_q are 'shd' (total, heads, dim) or 'hsd'"
        )
    return LAYOUTS[name]


def phantom(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of any size that takes no memory: only for calls that read no array."""
    extents = [whole("an extent of a shape", extent, 0) for extent in shape]
    size: int = np.dtype(dtype).itemsize
    strides: list[int] = []
    for extent in reversed(extents):
        strides.insert(0, size)
        size *= max(extent, 1)
    if size >= 2**62:
        raise ShapeError(f"a shape is {shown(tuple(extents))}: no memory has 2^62 bytes")
    words = np.empty(1, f"u{np.dtype(dtype).itemsize}")  # NumPy's own: it knows no float8_e5m2
    return np.lib.stride_tricks.as_strided(words, extents, strides).view(dtype)
