# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grids of caches, as data: few query rows over long keys, contiguous or in pages.

Such a call reads every key and value once and does little else, so a cell counts bytes, and is
measured by the time of a plain read of as many.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .cells import EVERYTHING, ITEM_BYTES, Asked, Cell

HEADS = 32
GROUP = 4  # query heads that share keys
DIM = 128
# Caches of 8 bits, an option of cells whose queries have the dtype of the grid: bytes of a number.
QUANTISED_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
SHORTEST, LONGEST, DRAWN = 128, 8192, 128  # keys of drawn requests, and how many requests


@dataclass(frozen=True)
class CacheCell(Cell):
    """Requests with caches of their own; `rows` are the query rows of each, the last ones."""

    graph: bool = True
    kv_lengths: tuple[int, ...] = ()  # keys of each request
    q_lengths: tuple[int, ...] = ()  # query rows of each, packed; (): `rows` each
    page: int = 0  # rows of a page; 0: every request has one array of its own
    shared: int = 0  # keys at the beginning that all requests have in the same pages

    @property
    def kv_dtype(self) -> str:
        """The dtype of the caches."""
        return self.option or self.dtype

    @property
    def kv_rows(self) -> int:
        return max(self.kv_lengths)

    @property
    def q_rows(self) -> tuple[int, ...]:
        """Query rows of each request."""
        return self.q_lengths or (self.rows,) * self.batch

    @property
    def is_even(self) -> bool:
        """Whether all requests are of one length, which the shapes tell."""
        return min(self.kv_lengths) == self.kv_rows

    @property
    def pages(self) -> tuple[int, ...]:
        """How many pages each request has."""
        return tuple(-(-keys // self.page) for keys in self.kv_lengths)

    @property
    def num_pages(self) -> int:
        """How many pages there are, each once."""
        return sum(self.pages) - (self.batch - 1) * (self.shared // self.page)

    @property
    def shape(self) -> str:
        """As a table says it: requests x keys, rows of drafts, heads, head dim."""
        keys = str(self.kv_rows) if self.is_even else f"{min(self.kv_lengths)}..{self.kv_rows}"
        drafts = f"q {self.rows}" if self.rows > 1 else ""
        if self.q_lengths:
            ones = self.q_lengths.count(1)
            drafts = f"q 1, {len(self.q_lengths) - ones} chunks of {self.rows}"
        page = f"page {self.page}" if self.page else ""
        heads = f"heads {self.heads}/{self.kv_heads}"
        shared = f"{self.shared} shared" if self.shared else ""
        words = (f"{self.batch}x{keys}", shared, drafts, heads, f"D {self.dim}", page, self.option)
        return " ".join(filter(None, words))

    @property
    def name(self) -> str:
        return f"{self.grid} {self.dtype} {self.shape}"

    @property
    def flops(self) -> float:
        """4 H D for each visible pair."""
        pairs = sum(
            rows * keys - (rows * (rows - 1) // 2 if self.causal else 0)
            for rows, keys in zip(self.q_rows, self.kv_lengths)
        )
        return 4.0 * self.heads * self.dim * pairs

    @property
    def array_bytes(self) -> int:
        """Bytes of q, o and the keys and values that are present, each read or written once."""
        q = sum(self.q_rows) * self.heads * self.dim * ITEM_BYTES[self.dtype]
        keys = sum(self.kv_lengths) - (self.batch - 1) * self.shared
        sizes = {**ITEM_BYTES, **QUANTISED_BYTES}
        return 2 * q + 2 * keys * self.kv_heads * self.dim * sizes[self.kv_dtype]


def drawn_lengths() -> tuple[int, ...]:
    """Keys of requests that came at different times, the same in every run."""
    draw = random.Random(LONGEST)
    return tuple(draw.randint(SHORTEST, LONGEST) for _ in range(DRAWN))


# Query rows, and keys of each request; several rows are drafts, causal among themselves.
CASES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1,), (4096,)),
    ((1,), (65536,)),
    ((1,), (8192,) * 8),
    ((1,), (8192,) * 32),
    ((1,), (4096,) * 128),
    ((1,), drawn_lengths()),
    ((1,), (32768,) * 8),
    ((4,), (32768,) * 8),
)
# A step of a server: requests that decode beside chunks of prompts; decoding alone; chunks alone.
DECODES, CHUNKS = (1,) * 64, (2048,) * 2
MIXED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    (DECODES + CHUNKS, (8192,) * 66),
    (CHUNKS, (8192,) * 2),
    ((1,), (8192,) * 64),
)
# Requests with one prompt: its keys, and those that each has behind them.
PROMPT, OWN = 16384, 512
CASCADE = (((1,), (PROMPT + OWN,) * 64),)


@dataclass(frozen=True)
class CacheGrid:
    """The cases, by head dim, heads that share keys and page size."""

    name: str
    pages: tuple[int, ...]
    backend: str = "cuda"
    dtype: str = "bfloat16"
    groups: tuple[int, ...] = (GROUP,)
    cases: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = CASES
    shared: int = 0
    ways: tuple[str, ...] = ()  # of fulmen, beside its one call: see cache_sides.WAYS

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[CacheCell]:
        """Cells in order; rows asked for leave those whose longest request has so many keys."""
        choices = (asked.groups or self.groups, asked.dims or (DIM,), asked.pages or self.pages)
        option = asked.dtype if asked.dtype in QUANTISED_BYTES else ""
        dtype = (not option and asked.dtype) or self.dtype
        for group, dim, page in product(*choices):
            for q_rows, keys in self.cases:
                if max(keys) in (asked.rows or (max(keys),)):
                    yield CacheCell(
                        self.name, "forward", dtype, len(keys), HEADS, HEADS // group, max(q_rows),
                        dim, max(q_rows) > 1, graph=self.backend == "cuda", option=option,
                        kv_lengths=keys, q_lengths=q_rows if len(q_rows) > 1 else (), page=page,
                        shared=self.shared,
                    )  # fmt: skip


CACHE_GRIDS: dict[str, CacheGrid] = {
    grid.name: grid
    for grid in (
        CacheGrid("decode", (0,), ways=("invariant", "hnd")),
        CacheGrid("paged", (16, 64, 1), ways=("invariant", "hnd")),
        CacheGrid("mixed", (16,), cases=MIXED, ways=("apart",)),
        CacheGrid("cascade", (16,), cases=CASCADE, shared=PROMPT, ways=("cascade",)),
        CacheGrid("cpu-decode", (0, 16), "cpu", groups=(1, 4, 8), cases=(((1,), (8192,) * 4),)),
    )
}
