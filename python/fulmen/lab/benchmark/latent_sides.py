# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a cell of latent attention, who answers it, and the truth in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from inspect import signature
from typing import Any

import fulmen

from .latent_cells import DIM, DIM_V, LISTS, POOL_ROWS, RECORDS, SCALE, LatentCell
from .loading import MissingError, load
from .sides import Answer, Side

GROUP = 128  # numbers of a record of 656 bytes that share a scale; of 584: 64


@dataclass
class Latents:
    """q is (request, 1, head, dim), the pool (page, row, 1, dim or bytes)."""

    q: Any
    pool: Any
    table: Any  # (request, page) int32; None where there are lists
    lengths: Any  # (request,) int32
    lists: Any  # (request, 1, key) int32 slots; None without
    numbers: Any  # slots -> (key, dim) float64


def _records(cell: LatentCell, rows: int, torch: Any, source: Any) -> tuple[Any, Any]:
    """A pool of records, and what reads them."""
    device, size = source.device, RECORDS[cell.option]
    stored = 448 if size == 584 else DIM_V
    numbers = torch.randn(rows, stored, generator=source, device=device).to(torch.float8_e4m3fn)
    position = torch.randn(rows, 64, generator=source, device=device).to(torch.bfloat16)
    groups = stored // (64 if size == 584 else GROUP)
    exponent = torch.randint(-2, 2, (rows, groups), generator=source, device=device)
    parts = (numbers.view(torch.uint8), position.view(torch.uint8))
    if size == 584:
        pages = rows // cell.page
        body = torch.cat(parts, 1).view(pages, -1)
        scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
        pool = torch.cat([body, scales.view(pages, -1)], 1)
    else:
        scales = torch.exp2(exponent.float()).view(torch.uint8)
        pool = torch.cat([parts[0], scales, parts[1]], 1)

    def read(slots: Any) -> Any:
        scale = torch.exp2(exponent[slots].double())
        wide = numbers[slots].double().view(-1, groups, stored // groups) * scale[..., None]
        return torch.cat([wide.flatten(1), position[slots].double()], 1)

    return pool.view(-1, cell.page, 1, size), read


def random_latents(cell: LatentCell, torch: Any, device: str) -> Latents:
    """Normal inputs, the same in every run of a cell. A list of records names rows of its own, in
    random order, half of those that its request has; other lists name rows of one pool.
    """
    source = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    q = torch.randn(
        (cell.batch, 1, cell.heads, cell.dim_q), generator=source, device=device
    ).to(dtype)  # fmt: skip
    each = cell.keys if not cell.option else 2 * cell.keys
    rows = -(-each // cell.page) * cell.page * cell.batch
    if cell.option == LISTS:
        rows = POOL_ROWS
    if cell.option in RECORDS:
        pool, read = _records(cell, rows, torch, source)
    else:
        flat = torch.randn((rows, DIM), generator=source, device=device).to(dtype)
        pool = flat.view(-1, cell.page, 1, DIM)

        def read(slots: Any) -> Any:
            return flat[slots].double()

    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)
    table, lists = None, None
    if not cell.option:
        pages = torch.randperm(rows // cell.page, generator=source, device=device)
        table = pages.int().view(cell.batch, -1)
    elif cell.option == LISTS:
        shape = (cell.batch, 1, cell.keys)
        lists = torch.randint(rows, shape, generator=source, device=device, dtype=torch.int32)
    else:
        own = rows // cell.batch
        drawn = [
            torch.randperm(own, generator=source, device=device)[: cell.keys] + request * own
            for request in range(cell.batch)
        ]
        lists = torch.stack(drawn)[:, None].int().contiguous()
    return Latents(q, pool, table, lengths, lists, read)


class FulmenLatent(Side):
    """`fulmen.attention_mla`."""

    name = "fulmen"
    options = ("", LISTS, *RECORDS)

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t = tensors
        given: dict[str, Any] = {"layout": "bshd", "scale": SCALE}
        if t.lists is None:
            given.update(page_table=t.table, kv_lengths=t.lengths)
        else:
            given.update(indices=t.lists, topk_lengths=t.lengths)
        return Answer(lambda: fulmen.attention_mla(t.q, t.pool, **given), lambda o: (o,), "mla")


class FlashMla(Side):
    """DeepSeek's FlashMLA; fewer than 64 heads as it wants them, among others of zeros."""

    name = "flash_mla"
    options = ("", LISTS, *RECORDS)

    def __init__(self) -> None:
        """From its package."""
        self.module = load("flash_mla")
        self.is_fork = "use_legacy" in signature(self.module.flash_mla_with_kvcache).parameters

    def answer(self, cell: Any, tensors: Any) -> Answer:
        import torch

        t, m = tensors, self.module
        heads = 64 if cell.heads <= 64 else 128
        q = t.q.new_zeros(cell.batch, 1, heads, cell.dim_q)
        q[:, :, : cell.heads] = t.q

        def results(o: Any) -> tuple[Any, ...]:
            return (o.view(cell.batch, 1, heads, DIM_V)[:, :, : cell.heads],)

        # A fork of it has kernels for Hopper behind an argument, which take bytes as they are.
        older = {"use_legacy": True} if self.is_fork else {}
        if cell.option == LISTS:
            rows, lists = t.pool.view(-1, 1, DIM), t.lists
            flat = q.view(cell.batch, heads, DIM)
            return Answer(
                lambda: m.flash_mla_sparse_fwd(flat, rows, lists, SCALE, **older)[0], results,
                "sparse_fwd",
            )  # fmt: skip
        is_typed = cell.option in RECORDS and not older
        pool = t.pool.view(torch.float8_e4m3fn) if is_typed else t.pool
        metadata = m.get_mla_metadata()[0]
        table, lengths = (None, None) if cell.option else (t.table, t.lengths)

        def call() -> Any:
            return m.flash_mla_with_kvcache(
                q, pool, table, lengths, DIM_V, metadata, None, SCALE, not cell.option,
                bool(cell.option), t.lists, **older,
            )[0]  # fmt: skip

        return Answer(call, results, "with_kvcache")


class LatentTruth:
    """o of two requests, one head each, in float64."""

    def __init__(self, cell: LatentCell, latents: Latents, torch: Any) -> None:
        """Computed where the arrays are."""
        choose = random.Random(cell.name)
        self.stack = torch.stack
        self.wanted = {}
        for request in sorted({0, choose.randrange(cell.batch)}):
            head = choose.randrange(cell.heads)
            rows = latents.numbers(self._slots(cell, latents, request, torch))
            s = SCALE * (rows @ latents.q[request, 0, head].double())
            self.wanted[request, head] = torch.softmax(s, -1) @ rows[:, :DIM_V]

    def _slots(self, cell: LatentCell, t: Latents, request: int, torch: Any) -> Any:
        if t.lists is not None:
            return t.lists[request, 0].long()
        rows = torch.arange(cell.page, device=t.q.device)
        return (t.table[request].long()[:, None] * cell.page + rows).flatten()[: cell.keys]

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest |o - truth|; NaN where a result is not finite."""
        found = [
            abs(got[0][request, 0, head].double() - o).max()
            for (request, head), o in self.wanted.items()
        ]
        return float(self.stack(found).max())


def known_peer(name: str) -> Side:
    """A peer by name.

    Raises:
        MissingError: there is none, or it is not installed.
    """
    if name != FlashMla.name:
        raise MissingError(f"latent attention is timed beside {FlashMla.name}")
    return FlashMla()
