# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid of new rows that go into caches, as data: a step of many requests, chunks of prompts.

An append moves bytes and does little else: a cell is measured by a copy of as many, and by a graph
that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .cells import EVERYTHING, ITEM_BYTES, Asked, Cell

HEADS = 32
GROUP = 4  # query heads that share keys
DIM = 128
TOKENS = (64, 1024, 16384)
ROTARY = "rotary"  # the option of cells that rotate k and q on the way
DTYPE = "bfloat16"


@dataclass(frozen=True)
class AppendCell(Cell):
    """Packed new rows, `rows` in all, each with a slot of its own in the pool."""

    graph: bool = True
    page: int = 16  # rows of a page

    @property
    def shape(self) -> str:
        """As a table says it: rows, heads of K and V, head dim, rows of a page."""
        heads = f"heads {self.heads}/{self.kv_heads}" if self.option else f"heads {self.kv_heads}"
        return f"{self.rows} rows {heads} D {self.dim} page {self.page} {self.option}".rstrip()

    @property
    def name(self) -> str:
        return f"{self.grid} {self.dtype} {self.shape}"

    @property
    def flops(self) -> float:
        """What attention counts, products, is not there."""
        return 0.0

    @property
    def array_bytes(self) -> int:
        """Bytes of k and v, and of q where it is rotated, each read once and written once."""
        heads = 2 * self.kv_heads + (self.heads if self.option else 0)
        return 2 * self.rows * heads * self.dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class AppendGrid:
    """The cells, by numbers of rows, head dim and page size."""

    name: str
    pages: tuple[int, ...]
    backend: str = "cuda"

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[AppendCell]:
        """Cells in order; rows asked for are numbers of new rows."""
        choices = product(
            asked.groups or (GROUP,), asked.dims or (DIM,), asked.pages or self.pages, ("", ROTARY),
            asked.rows or TOKENS,
        )  # fmt: skip
        for group, dim, page, option, count in choices:
            yield AppendCell(
                self.name, "append", asked.dtype or DTYPE, 1, HEADS, HEADS // group, count, dim,
                False, option=option, page=page,
            )  # fmt: skip


APPEND_GRIDS = {grid.name: grid for grid in (AppendGrid("append", (16,)),)}
