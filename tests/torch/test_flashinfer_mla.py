# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrapper for latent attention, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from fulmen.compat.flashinfer import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    append_paged_mla_kv_cache,
)
from fulmen.errors import ArgumentError, UnsupportedError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LATENT, ROPE, HEADS, PAGE, SCALE = 64, 16, 3, 4, 0.2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_appended_and_attended(causal: bool, device: str):
    indptr = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device)
    indices = torch.tensor([5, 0, 3, 2, 6], dtype=torch.int32, device=device)
    lengths = torch.tensor([9, 0, 7], dtype=torch.int32, device=device)
    cu_q = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    cache = torch.full((8, PAGE, LATENT + ROPE), torch.nan, device=device)
    ckv, kpe = cache[..., :LATENT], cache[..., LATENT:]
    rows = torch.randn(16, LATENT + ROPE, device=device)
    batch = torch.tensor([0] * 9 + [2] * 7, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).to(torch.int32).to(device)
    append_paged_mla_kv_cache(
        rows[:, :LATENT], rows[:, LATENT:], batch, positions, ckv, kpe, indices, indptr, lengths
    )
    q = torch.randn(5, HEADS, LATENT + ROPE, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(
        cu_q, indptr, indices, lengths, HEADS, LATENT, ROPE, PAGE, causal, SCALE, q.dtype, q.dtype
    )
    parts = (q[..., :LATENT], q[..., LATENT:], ckv, kpe)
    o, lse = wrapper.run(*parts, return_lse=True)
    out = torch.empty_like(o)
    assert wrapper.run(*parts, out=out) is out
    natural = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural * math.log2(math.e), lse)
    for first, last, keys in ((0, 2, rows[:9]), (2, 5, rows[9:])):
        s = torch.einsum("qhd,kd->qhk", q[first:last].double(), keys.double()) * SCALE
        if causal:
            i = torch.arange(last - first, device=device)[:, None] + len(keys) - (last - first)
            s = s.masked_fill((torch.arange(len(keys), device=device) > i)[:, None], -torch.inf)
        wanted = torch.einsum("qhk,kd->qhd", s.softmax(-1), keys[:, :LATENT].double())
        torch.testing.assert_close(o[first:last].double(), wanted, atol=1e-5, rtol=1e-5)
        sums = s.logsumexp(-1) / math.log(2)
        torch.testing.assert_close(lse[first:last].double(), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "cap"), [(-1, None), (3, 2.0)])
def test_decoding(window: int, cap: float | None, device: str):
    indptr = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device)
    indices = torch.tensor([5, 0, 3, 2, 6], dtype=torch.int32, device=device)
    last = torch.tensor([1, 0, 3], dtype=torch.int32, device=device)
    cache = torch.randn(8, PAGE, LATENT + ROPE, device=device)
    q = torch.randn(3, HEADS, LATENT + ROPE, device=device)
    wrapper = BatchDecodeMlaWithPagedKVCacheWrapper(torch.empty(1, device=device))
    wrapper.plan(indptr, indices, last, HEADS, LATENT, PAGE, SCALE, window, cap)
    parts = (q[..., :LATENT], q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:])
    o, lse = wrapper.run(*parts, return_lse=True)
    for b, (pages, keys) in enumerate((([5, 0, 3], 9), ([], 0), ([2, 6], 7))):
        rows = cache[pages].reshape(-1, LATENT + ROPE)[:keys].double()
        s = torch.einsum("hd,kd->hk", q[b].double(), rows) * SCALE
        s = s if cap is None else cap * torch.tanh(s / cap)
        s = s[:, max(keys - 1 - window, 0) :] if window >= 0 else s
        rows = rows[max(keys - 1 - window, 0) :] if window >= 0 else rows
        wanted = s.softmax(-1) @ rows[:, :LATENT]
        torch.testing.assert_close(o[b].double(), wanted, atol=1e-5, rtol=1e-5)
        sums = s.logsumexp(-1) / math.log(2)
        torch.testing.assert_close(lse[b].double(), sums, atol=1e-5, rtol=1e-5)


def test_refusals_of_decoding():
    wrapper = BatchDecodeMlaWithPagedKVCacheWrapper()
    one = torch.tensor([0, 1], dtype=torch.int32)
    plan = (one, one[:1], one[1:], 1, 8, 2, 1.0)
    with pytest.raises(UnsupportedError, match="nothing rotates here"):
        wrapper.plan(*plan, rope_theta=1e4)
    wrapper.plan(*plan)
    cache = torch.zeros(1, 2, 12)
    given = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 4), cache[..., :8], cache[..., 8:])
    with pytest.raises(UnsupportedError, match="k_scale is 2"):
        wrapper.run(*given, k_scale=2.0)


def test_refusals():
    wrapper = BatchMLAPagedAttentionWrapper()
    one = torch.tensor([0, 1], dtype=torch.int32)
    wrapper.plan(one, one, one[:1], one[1:], 1, 8, 4, 2, False, 1.0)
    q_nope, q_pe = torch.zeros(1, 1, 8), torch.zeros(1, 1, 4)
    with pytest.raises(UnsupportedError, match=r"allocate \(page, row, 12\)"):
        wrapper.run(q_nope, q_pe, torch.zeros(1, 2, 8), torch.zeros(1, 2, 4))
    cache = torch.zeros(1, 2, 12)
    with pytest.raises(ArgumentError, match="kv_len is given to run"):
        wrapper.run(q_nope, q_pe, cache[..., :8], cache[..., 8:], kv_len=one[1:])
