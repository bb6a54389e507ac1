# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.flash_mla over the grid of FlashMLA's own test: against float64, row by row."""

from __future__ import annotations

import pytest
import torch

from fulmen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from fulmen.errors import UnsupportedError

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
    pool, table, lens = cache_of(lengths, page, dims[0], device)
    q = torch.randn(3, q_rows, heads, dims[0]).to(torch.bfloat16).to(device)
    metadata, splits = get_mla_metadata(lens, heads * q_rows, 1)
    o, lse = flash_mla_with_kvcache(q, pool, table, lens, dims[1], metadata, splits, SCALE, causal)
    assert o.shape == (3, q_rows, heads, dims[1])
    assert lse.shape == (3, heads, q_rows)
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


def test_refusals():
    q, pool = torch.randn(1, 1, 2, 72), torch.randn(2, 4, 1, 72)
    given = (q, pool, torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5]), 64)
    with pytest.raises(UnsupportedError, match="is_fp8_kvcache is True"):
        flash_mla_with_kvcache(*given, is_fp8_kvcache=True)
    with pytest.raises(UnsupportedError, match="indices is given"):
        flash_mla_with_kvcache(*given, indices=torch.zeros(1, 1, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="attn_sink is given"):
        flash_mla_with_kvcache(*given, attn_sink=torch.zeros(2))
