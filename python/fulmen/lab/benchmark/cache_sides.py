# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a cell of caches, fulmen's answer to it, and the truth in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

import fulmen

from .cache_cells import CacheCell
from .loading import MissingError
from .sides import Answer, Side, Tensors

LAYOUT = "bshd"  # heads inside a token, as servers have them


@dataclass
class Caches(Tensors):
    """q and o are (request, row, head, dim); k and v (request, row, kv_head, dim), or in pages
    (page, row, kv_head, dim), found through the table. Integers are int32, where q is.
    """

    lengths: Any  # (request,) keys present
    table: Any  # (request, page); None: contiguous
    indptr: Any  # (request + 1,): the pages of request r are pages[indptr[r] : indptr[r + 1]]
    pages: Any


def pages_of(cell: CacheCell) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table, the offsets and the list of the pages of a cell: shuffled, none of them shared.

    Entries of the table past a request's last page are its first one: some libraries look there.
    """
    counts = cell.pages
    shuffled = list(range(sum(counts)))
    random.Random(0).shuffle(shuffled)
    pages = np.asarray(shuffled, np.int32)
    indptr = np.asarray([0, *accumulate(counts)], np.int32)
    table = np.empty((cell.batch, max(counts)), np.int32)
    for row, begin, end in zip(table, indptr, indptr[1:]):
        row[:] = pages[begin]
        row[: end - begin] = pages[begin:end]
    return table, indptr, pages


def random_caches(cell: CacheCell, torch: Any, device: str) -> Caches:
    """Normal inputs, the same in every run of a cell; slots past a length are random too."""
    source = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=source, device=device, dtype=dtype)

    def integers(x: Any) -> Any:
        return torch.as_tensor(x, dtype=torch.int32, device=device)

    table: Any = None
    indptr: Any = None
    pages: Any = None
    stored = (cell.batch, cell.kv_rows)
    if cell.page:
        table, indptr, pages = map(integers, pages_of(cell))
        stored = (len(pages), cell.page)
    k, v = (normal(*stored, cell.kv_heads, cell.dim) for _ in range(2))
    q = normal(cell.batch, cell.rows, cell.heads, cell.dim)
    return Caches(q, k, v, None, integers(cell.kv_lengths), table, indptr, pages)


class FulmenCaches(Side):
    """A plan of this package, with a workspace and a result of its own."""

    name = "fulmen"

    def __init__(self, implementation: str = "auto") -> None:
        """By the name of an implementation."""
        self.asked = implementation

    def _options(self, cell: CacheCell, lengths: Any, table: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "causal": cell.causal, "layout": LAYOUT, "implementation": self.asked,
        }  # fmt: skip
        if cell.page:
            return {**options, "page_table": table, "kv_lengths": lengths}
        return options if cell.is_even else {**options, "kv_lengths": lengths}

    def problem(self, cell: CacheCell) -> dict[str, Any]:
        """A cell as `fulmen.warmup` takes it."""
        table, stored = None, (cell.batch, cell.kv_rows)
        if cell.page:
            table, _, pages = pages_of(cell)
            stored = (len(pages), cell.page)
        kv = (*stored, cell.kv_heads, cell.dim)
        lengths = np.asarray(cell.kv_lengths, np.int32)
        return {
            "q": (cell.batch, cell.rows, cell.heads, cell.dim), "k": kv, "v": kv, "need": (),
            "dtype": cell.dtype, **self._options(cell, lengths, table),
        }  # fmt: skip

    def answer(self, cell: Any, tensors: Any) -> Answer:
        import torch

        q, k, v = tensors.q, tensors.k, tensors.v
        options = self._options(cell, tensors.lengths, tensors.table)
        out = torch.empty_like(q)
        try:
            plan = fulmen.plan(q, k, v, need=(), out=out, **options)
        except fulmen.UnsupportedError as error:
            raise MissingError(str(error)) from error
        size = plan.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
        return Answer(
            lambda: plan.forward(q, k, v, out=out, workspace=workspace),
            lambda x: (x.o,),
            plan.explain()["implementation"],
            size,
        )


class CacheTruth:
    """o of one (request, head) in float64."""

    def __init__(self, cell: CacheCell, caches: Caches, torch: Any) -> None:
        """Computed where the caches are."""
        choose = random.Random(cell.name)
        self.request, self.head = choose.randrange(cell.batch), choose.randrange(cell.heads)
        keys = cell.kv_lengths[self.request]
        kv_head = self.head * cell.kv_heads // cell.heads
        k, v = (self._rows(x, caches.table)[:keys, kv_head].double() for x in (caches.k, caches.v))
        s = cell.dim**-0.5 * (self._one(caches.q) @ k.T)
        if cell.causal:
            row = torch.arange(cell.rows, device=s.device)[:, None]
            hidden = torch.arange(keys, device=s.device) > row + keys - cell.rows
            s = s.masked_fill(hidden, float("-inf"))
        self.o = torch.softmax(s, -1) @ v

    def _one(self, x: Any) -> Any:
        return x[self.request, :, self.head].double()

    def _rows(self, x: Any, table: Any) -> Any:
        """Keys or values of the request, in order."""
        if table is None:
            return x[self.request]
        return x[table[self.request].long()].flatten(0, 1)

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest |o - truth|; NaN where a result is not finite."""
        return float(abs(self._one(got[0]) - self.o).max())
