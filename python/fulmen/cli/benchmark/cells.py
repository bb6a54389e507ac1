# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grids of shapes, as data: a cell is one problem that every side of a run answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

TOKENS = 16384  # batch * rows of the GPU grids: enough to fill a card
WIDTH = 2048  # heads * dim of the GPU grids
BACKWARD_FACTOR = 2.5  # five products instead of two
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Cell:
    """One problem; rows of q and of k are equal in these grids."""

    grid: str
    op: str  # "forward" or "backward"
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    dim: int
    causal: bool
    graph: bool = False  # so small that launching takes longer: timed by replays of a CUDA graph

    @property
    def name(self) -> str:
        """What progress and errors call it."""
        mask = "causal" if self.causal else "full"
        shape = f"{self.batch}x{self.heads}x{self.rows}x{self.dim}"
        return f"{self.op} {self.dtype} {shape} {mask}"

    @property
    def flops(self) -> float:
        """Arithmetic as everybody counts it: 4 B H S S D, half of it when causal."""
        pairs = self.rows * self.rows * (0.5 if self.causal else 1.0)
        forward = 4.0 * self.batch * self.heads * pairs * self.dim
        return forward * (BACKWARD_FACTOR if self.op == "backward" else 1.0)

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays, each read or written once."""
        q = self.batch * self.heads * self.rows * self.dim
        kv = self.batch * self.kv_heads * self.rows * self.dim
        elements = 2 * q + 2 * kv  # q, o, k, v
        if self.op == "backward":
            elements += 2 * q + 2 * kv  # do, dq, dk, dv
        return elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Grid:
    """A family of cells with the defaults of a grid."""

    name: str
    backend: str
    ops: tuple[str, ...]
    dtype: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    heads: int = 0  # 0: WIDTH / dim, and as many sequences as make TOKENS
    graph: bool = False

    def cells(
        self, rows: Sequence[int] | None, dims: Sequence[int] | None, dtype: str | None
    ) -> Iterator[Cell]:
        """The cells, long ones first: they tell most."""
        for s, d, op, causal in product(
            sorted(rows or self.rows, reverse=True), dims or self.dims, self.ops, (False, True)
        ):
            heads = self.heads or max(WIDTH // d, 1)
            batch = 1 if self.heads else max(TOKENS // s, 1)
            yield Cell(
                self.name, op, dtype or self.dtype, batch, heads, heads, s, d, causal, self.graph
            )


_LONG = (512, 1024, 2048, 4096, 8192, 16384)
GRIDS = {
    grid.name: grid
    for grid in (
        Grid("forward", "cuda", ("forward",), "bfloat16", _LONG, (64, 128, 256)),
        Grid("backward", "cuda", ("backward",), "bfloat16", _LONG, (64, 128, 256)),
        Grid("float32", "cuda", ("forward", "backward"), "float32", (1024, 4096), (64, 128)),
        Grid("small", "cuda", ("forward",), "bfloat16", (128, 512), (64, 128), heads=8, graph=True),
        Grid("cpu", "cpu", ("forward", "backward"), "float32", (1024, 4096), (64, 128), heads=4),
    )
}
