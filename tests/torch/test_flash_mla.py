# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.flash_mla over the grid of FlashMLA's own test: against float64, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from grids import drawn
from long_run import IS_FULL

import fulmen
from fulmen.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from fulmen.errors import ArgumentError, UnsupportedError

SCALE = 192**-0.5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = (0, 1, 63, 64, 65, 130, 257, 700)


def cache_of(lengths: list[int], page: int, dim: int, device: str) -> tuple[torch.Tensor, ...]:
    """Pages in any order; NaN behind each length, garbage in the table behind its last page."""
    pages = [-(-n // page) for n in lengths]
    pool = torch.full((sum(pages) + 2, page, 1, dim), torch.nan, dtype=torch.bfloat16)
    order = torch.randperm(sum(pages) + 2)
    table = torch.full((len(lengths), max(*pages, 1)), 10**8, dtype=torch.int32)
    first = 0
    for b, n in enumerate(lengths):
        ids = order[first : first + pages[b]]
        table[b, : pages[b]] = ids.to(torch.int32)
        rows = torch.full((pages[b] * page, dim), torch.nan)
        rows[:n] = torch.randn(n, dim)
        pool[ids] = rows.view(pages[b], page, 1, dim).to(torch.bfloat16)
        first += pages[b]
    return (
        pool.to(device),
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def check_dense(
    lengths: list[int], heads: int, q_rows: int, page: int, causal: bool, dims: tuple[int, int],
    device: str,
):  # fmt: skip
    pool, table, lens = cache_of(lengths, page, dims[0], device)
    q = torch.randn(len(lengths), q_rows, heads, dims[0]).to(torch.bfloat16).to(device)
    metadata, splits = get_mla_metadata(lens, heads * q_rows, 1)
    o, lse = flash_mla_with_kvcache(q, pool, table, lens, dims[1], metadata, splits, SCALE, causal)
    assert o.shape == (len(lengths), q_rows, heads, dims[1])
    assert lse.shape == (len(lengths), heads, q_rows)
    for b, n in enumerate(lengths):
        ids = table[b, : -(-n // page)].long()
        k = pool[ids].reshape(-1, dims[0])[:n].double()
        s = torch.einsum("qhd,kd->hqk", q[b].double(), k) * SCALE
        if causal:
            row = torch.arange(q_rows, device=device)[:, None]
            s = s.masked_fill(torch.arange(n, device=device) > row + n - q_rows, -torch.inf)
        expected_lse = s.logsumexp(-1) if n else s.new_full(s.shape[:2], -torch.inf)
        p = (s - expected_lse[..., None]).exp().nan_to_num(0)
        expected = torch.einsum("hqk,kd->qhd", p, k[:, : dims[1]])
        torch.testing.assert_close(o[b].double(), expected, atol=0.015, rtol=0.01)
        torch.testing.assert_close(lse[b].double(), expected_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "q_rows", "page", "causal", "dims"),
    [(1, 1, 64, False, (576, 512)), (3, 2, 16, True, (576, 512)), (9, 4, 1, True, (72, 64)),
     (64, 1, 64, True, (576, 512)), (126, 2, 8, True, (576, 512)), (128, 1, 32, False, (576, 512))],
)  # fmt: skip
def test_against_float64(
    heads: int, q_rows: int, page: int, causal: bool, dims: tuple[int, int], device: str
):
    torch.manual_seed(heads)
    lengths = [LENGTHS[(heads + i) % len(LENGTHS)] for i in range(3)]
    check_dense(lengths, heads, q_rows, page, causal, dims, device)


class Case(NamedTuple):
    """A call of the grid; `longest` and some shorter requests make the batch."""

    batch: int
    q_rows: int
    longest: int
    heads: int
    page: int
    causal: bool

    def pairs(self) -> int:
        return self.batch * self.q_rows * self.longest * self.heads


def grid() -> Iterator[Case]:
    """The ranges of FlashMLA's tests of dense decoding: every combination."""
    for values in itertools.product(
        (1, 2, 3, 6, 64, 128), (1, 2, 3, 4), (0, 1, 20, 140, 1000, 4096, 8736),
        (1, 3, 9, 63, 64, 126, 128), (1, 16, 64), (False, True),
    ):  # fmt: skip
        yield Case(*values)


def sampled() -> list[Case]:
    """Few of what a CPU has in a moment, among them each end of each range; else hundreds."""
    if IS_FULL:
        return drawn(list(grid()), 400 if torch.cuda.is_available() else 60)
    ends = [Case(1, 3, 8736, 63, 64, True), Case(128, 1, 140, 3, 16, False),
            Case(2, 4, 20, 128, 1, True), Case(64, 2, 0, 9, 64, True)]  # fmt: skip
    return ends + drawn([case for case in grid() if case.pairs() <= 1 << 20], 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", sampled(), ids=str)
def test_grid(case: Case, device: str):
    torch.manual_seed(case.pairs())
    lengths = [case.longest, *torch.randint(0, case.longest + 1, (case.batch - 1,)).tolist()]
    check_dense(lengths, case.heads, case.q_rows, case.page, case.causal, (576, 512), device)


def chosen(rows: int, topk: int, slots: int, device: str) -> torch.Tensor:
    """Slots in any order, -1 and numbers past the cache for none; row 0 has none at all."""
    indices = torch.randint(0, slots, (rows, topk))
    indices[torch.rand(rows, topk) < 0.2] = -1
    indices[torch.rand(rows, topk) < 0.1] = slots + 7
    indices[0] = -1
    return indices.to(torch.int32).to(device)


def sparse_row(
    q: torch.Tensor, keys: list[torch.Tensor], dim_v: int, sink: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(o, max, lse) of one query row (head, dim) over its keys, in float64."""
    k = torch.cat(keys).double()
    if len(k) == 0:
        none = q.new_full(q.shape[:1], -torch.inf, dtype=torch.float64)
        return q.new_zeros(q.shape[0], dim_v, dtype=torch.float64), none, none
    s = q.double() @ k.T * SCALE
    lse = s.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    return (s - total[:, None]).exp() @ k[:, :dim_v], s.amax(-1), lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "q_rows", "page", "topk", "dims"),
    [(64, 1, 64, 64, (576, 512)), (128, 2, 2, 128, (576, 512)), (8, 4, 53, 37, (72, 64))],
)
def test_sparse_decoding(
    heads: int, q_rows: int, page: int, topk: int, dims: tuple[int, int], device: str
):
    torch.manual_seed(topk)
    q = torch.randn(2, q_rows, heads, dims[0]).to(torch.bfloat16).to(device)
    pools = [torch.randn(n, page, 1, dims[0]).to(torch.bfloat16).to(device) for n in (5, 3)]
    lists = [chosen(2 * q_rows, n, len(pool) * page, device) for n, pool in zip((topk, 11), pools)]
    lengths = torch.tensor([topk, topk // 2], dtype=torch.int32, device=device)
    sink = torch.randn(heads, device=device)
    for given in ({}, {"topk_length": lengths}, {"attn_sink": sink}, {"extra": True}):
        with_extra = given.pop("extra", False)
        extra = {}
        if with_extra:
            extra = {
                "extra_k_cache": pools[1],
                "extra_indices_in_kvcache": lists[1].view(2, q_rows, -1),
            }
        o, lse = flash_mla_with_kvcache(
            q, pools[0], None, None, dims[1], None, None, SCALE,
            indices=lists[0].view(2, q_rows, topk), **given, **extra,
        )  # fmt: skip
        for row in range(2 * q_rows):
            b, i = divmod(row, q_rows)
            most = int(lengths[b]) if "topk_length" in given else topk
            keys = [
                pool.view(-1, dims[0])[slots[(slots >= 0) & (slots < len(pool) * page)].long()]
                for pool, slots in zip(pools, (lists[0][row, :most], lists[1][row]))
            ]
            wanted = sparse_row(q[b, i], keys if with_extra else keys[:1], dims[1],
                                given.get("attn_sink"))  # fmt: skip
            torch.testing.assert_close(o[b, i].double(), wanted[0], atol=0.015, rtol=0.01)
            torch.testing.assert_close(lse[b, :, i].double(), wanted[2], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_prefill(device: str):
    torch.manual_seed(3)
    heads, rows, topk, dim, dim_v = 4, 9, 40, 72, 64
    q = torch.randn(rows, heads, dim).to(torch.bfloat16).to(device)
    kv = torch.randn(100, 1, dim).to(torch.bfloat16).to(device)
    indices = chosen(rows, topk, 100, device)
    lengths = torch.arange(rows, dtype=torch.int32, device=device) * 5
    sink = torch.randn(heads, device=device)
    found = flash_mla_sparse_fwd(q, kv, indices[:, None], SCALE, dim_v, sink, lengths)
    for i in range(rows):
        slots = indices[i, : int(lengths[i])]
        keys = kv[slots[(slots >= 0) & (slots < 100)].long(), 0]
        wanted = sparse_row(q[i], [keys], dim_v, sink)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x[i].double(), y, atol=0.015, rtol=0.01)


def test_refusals():
    q, pool = torch.randn(1, 1, 2, 72), torch.randn(2, 4, 1, 72)
    given = (q, pool, torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5]), 64)
    with pytest.raises(ArgumentError, match="is_fp8_kvcache is True and k_cache is torch"):
        flash_mla_with_kvcache(*given, is_fp8_kvcache=True)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="causal is given beside indices"):
        flash_mla_with_kvcache(*given, causal=True, indices=indices)
    with pytest.raises(UnsupportedError, match="kv has 2 heads"):
        flash_mla_sparse_fwd(q[0], torch.randn(4, 2, 72), indices[0], 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [656, 584])
def test_records(size: int, device: str):
    """Written on the CPU by append_kv, read as FlashMLA reads them."""
    torch.manual_seed(size)
    dims = {656: 576, 584: 512}[size]
    rows = torch.randn(1, 40, 1, dims).to(torch.bfloat16)
    pool = torch.zeros(5, 8, 1, size, dtype=torch.uint8).view(torch.float8_e4m3fn)
    fulmen.append_kv(pool, None, rows, None, torch.arange(40)[None], layout="bshd")
    pool = pool.to(device)
    q = torch.randn(2, 1, 16, dims).to(torch.bfloat16).to(device)
    indices = chosen(2, 12, 40, device)
    o, lse = flash_mla_with_kvcache(
        q, pool, None, None, 512, None, None, SCALE, False, True, indices[:, None]
    )
    for b in range(2):
        keys = rows[0, indices[b][(indices[b] >= 0) & (indices[b] < 40)].long().cpu(), 0]
        wanted = sparse_row(q[b, 0], [keys.to(device)], 512, None)
        torch.testing.assert_close(o[b, 0].double(), wanted[0], atol=0.15, rtol=0.1)
        torch.testing.assert_close(lse[b, :, 0].double(), wanted[2], atol=0.1, rtol=0.05)
