# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What an option may be named, with the numbers of fulmen.h, and the axes of the layouts."""

from __future__ import annotations

from typing import NamedTuple

from .errors import DTypeError, ShapeError
from .kinds import Array


class Layout(NamedTuple):
    """The axes of q, k, v, o and their gradients, in order."""

    name: str
    rank: int
    rows_before_heads: int

    def lse_shape(self, q_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of lse: (batch, head, row) without the axes that the layout leaves out."""
        if self.rows_before_heads:
            return (*q_shape[:-3], q_shape[-2], q_shape[-3])
        return tuple(q_shape[:-1])

    def check(self, x: Array, name: str) -> tuple[int, ...]:
        """The shape of x, which must have the axes of the layout."""
        try:
            shape: tuple[int, ...] = x.shape
        except AttributeError:
            raise DTypeError(
                f"{name} is {type(x).__name__}, not an array (NumPy, PyTorch, JAX: anything with "
                "DLPack)"
            ) from None
        if len(shape) != self.rank:
            others = [other.name for other in LAYOUTS.values() if other.rank == len(shape)]
            nearest = f": layout={' or '.join(map(repr, others))} has that many" if others else ""
            raise ShapeError(
                f"{name} has {len(shape)} axes {tuple(shape)}; layout={self.name!r} names "
                f"{self.rank}{nearest}"
            )
        return shape

    def check_all(self, q: Array, k: Array, v: Array) -> None:
        """Each of the three must have them."""
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            self.check(x, name)


LAYOUTS = {
    "bhsd": Layout("bhsd", 4, 0),
    "bshd": Layout("bshd", 4, 1),
    "hsd": Layout("hsd", 3, 0),
    "shd": Layout("shd", 3, 1),
    "sd": Layout("sd", 2, 0),
}
ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
BACKENDS = {"auto": 0, "cpu": 1, "cuda": 2}
CPU_IMPLEMENTATIONS = ("scalar", "tiled")
GPU_IMPLEMENTATIONS = ("naive", "simt", "sm80", "sm90")
PRECISIONS = {"float32": 0, "tf32": 1, "3xtf32": 2}
IMPLEMENTATIONS = {
    name: number for number, name in enumerate(("auto", *CPU_IMPLEMENTATIONS, *GPU_IMPLEMENTATIONS))
}
