# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grids of shapes, as data: a cell is one problem that every side of a run answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

TOKENS = 16384  # batch * rows of the GPU grids: enough to fill a card
WIDTH = 2048  # heads * dim of the GPU grids
BACKWARD_FACTOR = 2.5  # five products instead of two
# What a cell asks for beyond its shape: heads that share keys, four to one, and twice as many of
# them; sequences of many lengths, packed; the same bits in every run; logits up to a million; the
# last keys before a row alone; one sequence of many documents.
TRAINING_OPTIONS = ("", "grouped", "packed", "deterministic", "huge")
OPTIONS = (*TRAINING_OPTIONS, "window", "documents")
GROUP = 4
SHORTEST = 128  # packed sequence
WINDOW = 1024  # keys before its own that a row sees
DOCUMENT = 2048  # rows
HUGE = 1000.0  # what q and k are multiplied with
SAMPLED_ROWS = 256  # of results, that are compared with the truth
BLOCK_ROWS = 2048  # rows of its scores in memory at once
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Cell:
    """One problem; rows of q and of k are equal in these grids, of packed sequences the most."""

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
    option: str = ""  # of OPTIONS

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence or document; packed ones are the same in every run."""
        if self.option == "documents":
            return (DOCUMENT,) * (self.rows // DOCUMENT)
        if self.option != "packed":
            return (self.rows,) * self.batch
        draw = random.Random(self.rows)
        drawn = (draw.randint(SHORTEST, self.rows) for _ in range(4 * self.batch - 1))
        return (self.rows, *drawn)

    @property
    def kv_rows(self) -> int:
        """Keys of a sequence, at most."""
        return self.rows

    @property
    def is_joined(self) -> bool:
        """Whether its sequences lie one after the other in one."""
        return self.option in ("packed", "documents")

    @property
    def name(self) -> str:
        """What progress and errors call it."""
        mask = "causal" if self.causal else "full"
        shape = f"{self.batch}x{self.heads}x{self.rows}x{self.dim}"
        return f"{self.op} {self.dtype} {shape} {mask} {self.option}".rstrip()

    @property
    def flops(self) -> float:
        """Arithmetic as everybody counts it: 4 B H S S D, half of it when causal; of a window the
        pairs that it leaves visible.
        """
        pairs = sum(rows * rows for rows in self.lengths) * (0.5 if self.causal else 1.0)
        if self.option == "window":  # causal
            pairs = sum(min(i, WINDOW) + 1 for rows in self.lengths for i in range(rows))
        forward = 4.0 * self.heads * pairs * self.dim
        return forward * (BACKWARD_FACTOR if self.op == "backward" else 1.0)

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays, each read or written once."""
        q = sum(self.lengths) * self.heads * self.dim
        kv = sum(self.lengths) * self.kv_heads * self.dim
        elements = 2 * q + 2 * kv  # q, o, k, v
        if self.op == "backward":
            elements += 2 * q + 2 * kv  # do, dq, dk, dv
        return elements * ITEM_BYTES[self.dtype]


class Asked(NamedTuple):
    """What of a grid is asked for; None: all that it has."""

    rows: Sequence[int] | None = None
    dims: Sequence[int] | None = None
    dtype: str | None = None
    groups: Sequence[int] | None = None  # query heads that share keys, of caches
    pages: Sequence[int] | None = None  # rows of a page, of caches
    heads: Sequence[int] | None = None  # of whole sequences
    batch: int | None = None  # of whole sequences


EVERYTHING = Asked()


def cell_of(grid: str, op: str, dtype: str, rows: int, dim: int, causal: bool, option: str) -> Cell:
    """A cell of TOKENS and WIDTH."""
    heads = kv_heads = max(WIDTH // dim, 1)
    if option == "grouped":
        heads, kv_heads = 2 * heads, max(2 * heads // GROUP, 1)
    batch = 1 if option == "documents" else max(TOKENS // rows, 1)
    return Cell(grid, op, dtype, batch, heads, kv_heads, rows, dim, causal, option=option)


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
    options: tuple[str, ...] = ("",)

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[Cell]:
        """The cells, long ones first: they tell most."""
        lengths = sorted(asked.rows or self.rows, reverse=True)
        for s, d, h, op, causal, option in product(
            lengths, asked.dims or self.dims, asked.heads or (self.heads,), self.ops,
            (False, True), self.options,
        ):  # fmt: skip
            cell = cell_of(self.name, op, asked.dtype or self.dtype, s, d, causal, option)
            if self.heads:
                cell = replace(cell, batch=1)
            if h:
                shared = max(h // GROUP, 1) if option == "grouped" else h
                cell = replace(cell, heads=h, kv_heads=shared)
            yield replace(cell, graph=self.graph, batch=asked.batch or cell.batch)


@dataclass(frozen=True)
class Listed:
    """Causal forward cells that are no product: rows, dim, option and dtype of each."""

    name: str
    backend: str
    entries: tuple[tuple[int, int, str, str], ...]

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[Cell]:
        """Those of the lengths, head dims and dtype asked for, in order."""
        for s, d, option, named in self.entries:
            is_asked = s in (asked.rows or (s,)) and d in (asked.dims or (d,))
            if is_asked and named == (asked.dtype or named):
                yield cell_of(self.name, "forward", named, s, d, True, option)


_LONG = (512, 1024, 2048, 4096, 8192, 16384)
_DIMS = (64, 128, 256)
_BACK = ("backward",)
_OPTION_CELLS = (
    (16384, 128, "window", "bfloat16"),
    (4096, 128, "packed", "bfloat16"),
    (4096, 128, "grouped", "bfloat16"),
    (16384, 128, "grouped", "bfloat16"),
    (16384, 128, "documents", "bfloat16"),
    *((4096, dim, "", dtype) for dim in _DIMS for dtype in ("bfloat16", "float16")),
    (16384, 512, "", "bfloat16"),
)
GRIDS: dict[str, Grid | Listed] = {
    grid.name: grid
    for grid in (
        Grid("forward", "cuda", ("forward",), "bfloat16", _LONG, _DIMS),
        Grid("backward", "cuda", _BACK, "bfloat16", _LONG, _DIMS),
        Grid("training", "cuda", _BACK, "bfloat16", (4096, 16384), _DIMS, options=TRAINING_OPTIONS),
        Grid("float32", "cuda", ("forward", "backward"), "float32", (1024, 4096), (64, 128)),
        Grid("small", "cuda", ("forward",), "bfloat16", (128, 512), (64, 128), heads=8, graph=True),
        Listed("options", "cuda", _OPTION_CELLS),
        Grid("cpu", "cpu", ("forward", "backward"), "float32", (1024, 4096), (64, 128), heads=4),
    )
}
