# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a cell of caches, fulmen's answer to it, and the truth in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

import numpy as np

import fulmen
from fulmen.keywords import INVARIANT

from .cache_cells import QUANTISED_BYTES, CacheCell
from .loading import MissingError
from .sides import Answer, Side, Tensors

LAYOUT = "bshd"  # heads inside a token, as servers have them
SCALE_OF = {"float8_e4m3fn": 0.5, "float8_e5m2": 0.5, "int8": 4 / 127}  # of normal numbers


@dataclass
class Caches(Tensors):
    """q and o are (request, row, head, dim), or packed (row, head, dim); k and v (request, row,
    kv_head, dim), or in pages (page, row, kv_head, dim), found through the table. Integers are
    int32, where q is.
    """

    lengths: Any  # (request,) keys present
    table: Any  # (request, page); None: contiguous
    indptr: Any  # (request + 1,): the pages of request r are pages[indptr[r] : indptr[r + 1]]
    pages: Any
    cu_q: Any  # (request + 1,) of packed queries; None: (request, row, ...)
    scale: Any = None  # (kv_head, 1) float32 of quantised k and v, of both alike


def pages_of(cell: CacheCell) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table, the offsets and the list of the pages of a cell: shuffled; those of keys that all
    requests share come first in every list, the others are of one request each.

    Entries of the table past a request's last page are its first one: some libraries look there.
    """
    shuffled = list(range(cell.num_pages))
    random.Random(0).shuffle(shuffled)
    common = cell.shared // cell.page
    shared, own = shuffled[:common], iter(shuffled[common:])
    lists = [[*shared, *islice(own, count - common)] for count in cell.pages]
    table = np.empty((cell.batch, max(cell.pages)), np.int32)
    for row, pages in zip(table, lists):
        row[:] = pages[0]
        row[: len(pages)] = pages
    indptr = np.asarray([0, *accumulate(cell.pages)], np.int32)
    return table, indptr, np.asarray([page for pages in lists for page in pages], np.int32)


def random_caches(cell: CacheCell, torch: Any, device: str) -> Caches:
    """Normal inputs, the same in every run of a cell; slots past a length are random too."""
    source = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=source, device=device, dtype=dtype)

    def integers(x: Any) -> Any:
        return torch.as_tensor(x, dtype=torch.int32, device=device)

    def stored_as(x: Any) -> Any:
        if not cell.option:
            return x
        x = x.float() / SCALE_OF[cell.option]
        return (x.round().clamp(-127, 127) if cell.option == "int8" else x).to(
            getattr(torch, cell.option)
        )

    table: Any = None
    indptr: Any = None
    pages: Any = None
    stored = (cell.batch, cell.kv_rows)
    if cell.page:
        table, indptr, pages = map(integers, pages_of(cell))
        stored = (cell.num_pages, cell.page)
    k, v = (stored_as(normal(*stored, cell.kv_heads, cell.dim)) for _ in range(2))
    packed = bool(cell.q_lengths)
    q = normal(*((sum(cell.q_rows),) if packed else (cell.batch, cell.rows)), cell.heads, cell.dim)
    cu_q = integers([0, *accumulate(cell.q_rows)]) if packed else None
    scale = None
    if cell.option:
        scale = torch.full((cell.kv_heads, 1), SCALE_OF[cell.option], device=device)
    return Caches(q, k, v, None, integers(cell.kv_lengths), table, indptr, pages, cu_q, scale)


class FulmenCaches(Side):
    """A plan of this package, with a workspace and a result of its own."""

    name = "fulmen"
    options = ("", *QUANTISED_BYTES)
    asked_beside: Mapping[str, Any] = {}

    def __init__(self, implementation: str = "auto") -> None:
        """By the name of an implementation."""
        self.asked = implementation

    def _options(
        self, cell: CacheCell, lengths: Any, table: Any, cu_q: Any, scale: Any
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "causal": cell.causal, "layout": LAYOUT, "implementation": self.asked,
            **self.asked_beside,
        }  # fmt: skip
        if cell.option:
            options.update(k_scale=scale, v_scale=scale)
        if cu_q is not None:
            options.update(cu_q=cu_q, max_q=cell.rows, layout="shd")
        if cell.page:
            return {**options, "page_table": table, "kv_lengths": lengths}
        return options if cell.is_even else {**options, "kv_lengths": lengths}

    def problem(self, cell: CacheCell) -> dict[str, Any]:
        """A cell as `fulmen.warmup` takes it."""
        table, stored = None, (cell.batch, cell.kv_rows)
        if cell.page:
            table, _, _ = pages_of(cell)
            stored = (cell.num_pages, cell.page)
        kv = (*stored, cell.kv_heads, cell.dim)
        lengths = np.asarray(cell.kv_lengths, np.int32)
        rows: tuple[int, ...] = (cell.batch, cell.rows)
        cu_q = None
        if cell.q_lengths:
            rows, cu_q = (sum(cell.q_rows),), np.asarray([0, *accumulate(cell.q_rows)], np.int32)
        scale = np.ones((cell.kv_heads, 1), np.float32)
        return {
            "q": (*rows, cell.heads, cell.dim), "k": kv, "v": kv, "need": (),
            "dtype": cell.dtype, "kv_dtype": cell.kv_dtype,
            **self._options(cell, lengths, table, cu_q, scale),
        }  # fmt: skip

    def answer(self, cell: Any, tensors: Any) -> Answer:
        import torch

        t = tensors
        q, k, v = t.q, t.k, t.v
        options = self._options(cell, t.lengths, t.table, t.cu_q, t.scale)
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


class FulmenInvariant(FulmenCaches):
    """The same whose bits do not depend on the other requests."""

    name = "fulmen invariant"
    asked_beside = INVARIANT


class FulmenHeadsFirst(FulmenCaches):
    """The same over caches whose heads lie outside of rows in memory."""

    name = "fulmen hnd"

    def answer(self, cell: Any, tensors: Any) -> Answer:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (tensors.k, tensors.v))
        return super().answer(cell, replace(tensors, k=k, v=v))


class FulmenCascade(FulmenCaches):
    """The same call, which says how many keys all requests share."""

    name = "fulmen cascade"

    def _options(
        self, cell: CacheCell, lengths: Any, table: Any, cu_q: Any, scale: Any
    ) -> dict[str, Any]:
        if not cell.shared:
            raise MissingError("its requests share no keys")
        said = lengths[:1] * 0 + cell.shared  # where the lengths are
        return {**super()._options(cell, lengths, table, cu_q, scale), "kv_shared": said}


class FulmenApart(FulmenCaches):
    """A mixed cell in two plans, one after the other: the requests of one row, then the chunks."""

    name = "fulmen apart"

    def answer(self, cell: Any, tensors: Any) -> Answer:
        import torch

        t = tensors
        if not cell.q_lengths or min(cell.q_rows) == cell.rows:
            raise MissingError("its requests are of one kind")
        ones = cell.q_rows.count(1)  # they come first
        halves = []
        for requests in (slice(None, ones), slice(ones, None)):
            part = replace(
                cell, batch=len(cell.q_rows[requests]), rows=max(cell.q_rows[requests]),
                q_lengths=cell.q_rows[requests], kv_lengths=cell.kv_lengths[requests],
            )  # fmt: skip
            rows = slice(ones) if requests.start is None else slice(ones, None)
            cu_q = torch.as_tensor([0, *accumulate(part.q_rows)], device=t.q.device)
            half = replace(
                t, q=t.q[rows], lengths=t.lengths[requests], table=t.table[requests],
                cu_q=cu_q.to(torch.int32),
            )  # fmt: skip
            halves.append(super().answer(part, half))
        one, other = halves

        def call() -> tuple[Any, Any]:
            return one.call(), other.call()

        names = " + ".join(dict.fromkeys(half.implementation for half in halves))
        return Answer(
            call, lambda x: (torch.cat([y.o for y in x]),), names,
            sum(half.extra_bytes for half in halves),
        )  # fmt: skip


# By the name that a grid has for it (cache_cells.CacheGrid.ways).
WAYS: dict[str, Callable[[str], Side]] = {
    "invariant": FulmenInvariant,
    "hnd": FulmenHeadsFirst,
    "apart": FulmenApart,
    "cascade": FulmenCascade,
}


class CacheTruth:
    """o of one (request, head) in float64, and of one of those with the most rows."""

    def __init__(self, cell: CacheCell, caches: Caches, torch: Any) -> None:
        """Computed where the caches are."""
        self.begins = [0, *accumulate(cell.q_rows)] if cell.q_lengths else None
        self.stack = torch.stack
        choose = random.Random(cell.name)
        requests = {choose.randrange(cell.batch), cell.q_rows.index(cell.rows)}
        self.wanted = {
            (request, head): self._attended(cell, caches, torch, request, head)
            for request in sorted(requests)
            for head in (choose.randrange(cell.heads),)
        }

    def _attended(
        self, cell: CacheCell, caches: Caches, torch: Any, request: int, head: int
    ) -> Any:
        keys, rows = cell.kv_lengths[request], cell.q_rows[request]
        kv_head = head * cell.kv_heads // cell.heads
        k, v = (
            self._keys(x, caches.table, request)[:keys, kv_head].double()
            for x in (caches.k, caches.v)
        )
        if caches.scale is not None:
            k, v = (float(caches.scale[kv_head]) * x for x in (k, v))
        s = cell.dim**-0.5 * (self._rows(caches.q, request, head) @ k.T)
        if cell.causal:
            row = torch.arange(rows, device=s.device)[:, None]
            hidden = torch.arange(keys, device=s.device) > row + keys - rows
            s = s.masked_fill(hidden, float("-inf"))
        return torch.softmax(s, -1) @ v

    def _rows(self, x: Any, request: int, head: int) -> Any:
        """q or o of a request."""
        if self.begins is None:
            return x[request, :, head].double()
        begin, end = self.begins[request : request + 2]
        return x[begin:end, head].double()

    def _keys(self, x: Any, table: Any, request: int) -> Any:
        """Keys or values of a request, in order."""
        return x[request] if table is None else x[table[request].long()].flatten(0, 1)

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest |o - truth|; NaN where a result is not finite."""
        found = [
            abs(self._rows(got[0], request, head) - o).max()
            for (request, head), o in self.wanted.items()
        ]
        return float(self.stack(found).max())
