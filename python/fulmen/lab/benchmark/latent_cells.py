# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid of latent attention, as data: decoding over pages, and over lists of rows.

Rows of the cache are 512 latent numbers and 64 that carry the position (DeepSeek-V2, 2024), of
16 bits or records of bytes; a list names the rows that a query row sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .cells import EVERYTHING, ITEM_BYTES, Asked, Cell

DIM, DIM_V = 576, 512
PAGE = 64
DTYPE = "bfloat16"
RECORDS = {"656": 656, "584": 584}  # bytes of a row, an option of cells
LISTS = "lists"  # of rows of 16 bits, all in one pool
POOL_ROWS = 16384  # of such a pool
SCALE = 192**-0.5  # of the heads before absorption


@dataclass(frozen=True)
class LatentCell(Cell):
    """Requests of one query row over `keys` rows each."""

    graph: bool = True
    keys: int = 0
    page: int = PAGE

    @property
    def kv_rows(self) -> int:
        return self.keys

    @property
    def dim_q(self) -> int:
        """Of a query: records of 584 bytes have 512 numbers, the last 64 of them with the position
        and a part of the value.
        """
        return DIM_V if self.option == "584" else DIM

    @property
    def row_bytes(self) -> int:
        """Of a row of the cache."""
        return RECORDS.get(self.option, DIM * ITEM_BYTES[self.dtype])

    @property
    def shape(self) -> str:
        """As a table says it: requests x keys, heads, what rows are."""
        kinds = {"": f"page {self.page}", LISTS: "lists"}
        kind = kinds.get(self.option, f"lists of records of {self.option} bytes")
        return f"{self.batch}x{self.keys} heads {self.heads} {kind}"

    @property
    def name(self) -> str:
        return f"{self.grid} {self.dtype} {self.shape}"

    @property
    def flops(self) -> float:
        """2 H (576 + 512) for each key."""
        return 2.0 * self.batch * self.keys * self.heads * (self.dim_q + DIM_V)

    @property
    def array_bytes(self) -> int:
        """Bytes of q, o and the rows that are read, each once, or of a list's pool whole."""
        q = self.batch * self.heads * (self.dim_q + DIM_V) * ITEM_BYTES[self.dtype]
        rows = POOL_ROWS if self.option == LISTS else self.batch * self.keys
        return q + rows * self.row_bytes


# Option, heads, requests, keys of each.
CASES: tuple[tuple[str, int, int, int], ...] = (
    ("656", 128, 128, 2048),
    ("584", 128, 128, 2048),
    ("656", 16, 8, 2048),
    ("656", 8, 8, 2048),
    ("656", 128, 1, 2048),
    ("656", 16, 128, 2048),
    (LISTS, 64, 2048, 2048),
    (LISTS, 128, 2048, 2048),
    ("", 128, 128, 4096),
    ("", 128, 16, 8192),
    ("", 128, 1, 4096),
    ("", 128, 1, 32768),
    ("", 16, 64, 8192),
    ("", 128, 128, 16384),
)


@dataclass(frozen=True)
class LatentGrid:
    """The cases."""

    name: str
    backend: str = "cuda"

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[LatentCell]:
        """Cells in order; rows asked for leave those of so many keys."""
        for option, heads, batch, keys in CASES:
            if keys in (asked.rows or (keys,)):
                yield LatentCell(
                    self.name, "forward", asked.dtype or DTYPE, batch, heads, 1, 1, DIM, False,
                    option=option, keys=keys,
                )  # fmt: skip


LATENT_GRIDS = {grid.name: grid for grid in (LatentGrid("latent"),)}
