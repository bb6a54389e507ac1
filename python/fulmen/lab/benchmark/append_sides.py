# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a cell of appended rows, who answers it, and the truth in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fulmen

from .append_cells import AppendCell
from .loading import load
from .sides import Answer, Side

POSITIONS = 4096  # rows of cos and sin


@dataclass
class NewRows:
    """k, v (row, kv_head, dim) and q (row, head, dim); the pools are (page, row, kv_head, dim).

    slots (row,) are in random order, int64; cos and sin (position, dim / 2) are float32.
    """

    q: Any
    k: Any
    v: Any
    k_pages: Any
    v_pages: Any
    slots: Any
    positions: Any  # (row,) int32
    cos: Any
    sin: Any


def random_rows(cell: AppendCell, torch: Any, device: str) -> NewRows:
    """Normal rows, the same in every run of a cell, and pools full of NaN."""
    source = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    pages = -(-2 * cell.rows // cell.page)  # twice the room that is needed
    pool = (pages, cell.page, cell.kv_heads, cell.dim)
    k_pages, v_pages = (torch.full(pool, float("nan"), dtype=dtype, device=device) for _ in "kv")
    q, k, v = (
        torch.randn((cell.rows, heads, cell.dim), generator=source, device=device, dtype=dtype)
        for heads in (cell.heads, cell.kv_heads, cell.kv_heads)
    )
    slots = torch.randperm(pages * cell.page, generator=source, device=device)[: cell.rows]
    positions = torch.randint(
        POSITIONS, (cell.rows,), generator=source, device=device, dtype=torch.int32
    )
    tables = fulmen.rotary_tables(POSITIONS, cell.dim)
    cos, sin = (torch.as_tensor(x, device=device) for x in tables)
    return NewRows(q, k, v, k_pages, v_pages, slots, positions, cos, sin)


class FulmenAppend(Side):
    """`fulmen.append_kv`; with the rotary option k and q are rotated in the same kernel."""

    name = "fulmen"
    options = ("", "rotary")

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t = tensors
        given: dict[str, Any] = {"cu_new": t.slots.new_tensor([0, cell.rows]).int()}
        if cell.option:
            given.update(q=t.q, positions=t.positions, cos=t.cos, sin=t.sin)

        def call() -> Any:
            return fulmen.append_kv(t.k_pages, t.v_pages, t.k, t.v, t.slots, layout="shd", **given)

        return Answer(call, lambda q: (t.k_pages, t.v_pages, q), "append")


class IndexCopy(Side):
    """torch's index_copy_ of the rows of k, then of those of v."""

    name = "torch"

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t = tensors
        pools = [x.view(-1, *x.shape[2:]) for x in (t.k_pages, t.v_pages)]

        def call() -> None:
            for pool, rows in zip(pools, (t.k, t.v)):
                pool.index_copy_(0, t.slots, rows)

        return Answer(call, lambda _: (t.k_pages, t.v_pages, None), "index_copy_")


class FlashInferAppend(Side):
    """FlashInfer's append_paged_kv_cache; each row is a request whose only page is its own."""

    name = "flashinfer"

    def __init__(self) -> None:
        """From its package."""
        self.function = load("flashinfer").append_paged_kv_cache

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t = tensors
        pages, rows = (t.slots // cell.page).int(), (t.slots % cell.page).int()
        requests = t.positions.new_tensor(range(cell.rows))
        indptr = t.positions.new_tensor(range(cell.rows + 1))

        def call() -> None:
            self.function(
                t.k, t.v, requests, rows, (t.k_pages, t.v_pages), pages, indptr, rows + 1, "NHD"
            )

        return Answer(call, lambda _: (t.k_pages, t.v_pages, None), "append_paged_kv_cache")


class AppendTruth:
    """Every appended row: as given, or rotated in float64."""

    def __init__(self, cell: AppendCell, rows: NewRows, torch: Any) -> None:
        """Computed where the rows are; the pools are poisoned again before each answer."""
        self.rows, self.rotates, self.stack = rows, bool(cell.option), torch.stack
        self.wanted = [rows.k.double(), rows.v.double(), rows.q.double()]
        if self.rotates:
            cos, sin = (x[rows.positions.long()].double()[:, None] for x in (rows.cos, rows.sin))
            for number in (0, 2):
                a, b = self.wanted[number].chunk(2, -1)
                self.wanted[number] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest difference; NaN where a row was not written."""
        pools = [x.flatten(0, 1)[self.rows.slots].double() for x in got[:2]]
        found = [*pools, got[2].double()] if self.rotates else pools
        worst = self.stack([abs(x - y).max() for x, y in zip(found, self.wanted)]).max()
        for pool in (self.rows.k_pages, self.rows.v_pages):
            pool.fill_(float("nan"))
        return float(worst)
