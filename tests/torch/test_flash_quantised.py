# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits under the names of FlashAttention 3 and FlashInfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fulmen
from fulmen.compat import flash_attn_3, flashinfer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn


def stored(*shape: int) -> Any:
    return (torch.randn(*shape, device=DEVICE) * 30).to(E4M3)


def queries(*shape: int) -> Any:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def test_descales_are_scales_of_batch_and_head() -> None:
    q, k, v = queries(2, 3, 4, 32), stored(2, 9, 2, 32), stored(2, 9, 2, 32)
    descales = torch.rand(2, 2, 2, device=DEVICE) / 9
    found = flash_attn_3.flash_attn_func(
        q, k, v, causal=True, k_descale=descales[0], v_descale=descales[1]
    )
    wide = [x[:, None, :, None] * y.float() for x, y in zip(descales, (k, v))]
    wanted = fulmen.attention(q.float(), *wide, causal=True, layout="bshd")
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)

    one = descales[:, 0:1].expand(2, 2, 2)  # over pages: what all sequences share
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE)
    paged = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=table, causal=True, k_descale=one[0],
        v_descale=one[1],
    )  # fmt: skip
    by_head = [x[0, :, None] for x in one]
    same = fulmen.attention_paged(q, k, v, table, lengths, causal=True, layout="bshd",
                                  k_scale=by_head[0], v_scale=by_head[1])  # fmt: skip
    assert torch.equal(paged, same)
    with pytest.raises(fulmen.UnsupportedError, match="k_descale has numbers of each sequence"):
        flash_attn_3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, k_descale=descales[0]
        )

    eight = stored(2, 3, 4, 32)  # q too: heads of a group have one number
    found = flash_attn_3.flash_attn_func(eight, k, v, q_descale=descales[0], k_descale=descales[1])
    by_head = descales[0].repeat_interleave(2, 1)[:, None, :, None]
    wide = by_head * eight.float(), descales[1][:, None, :, None] * k.float(), v.float()
    wanted = fulmen.attention(*wide, layout="bshd")
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def test_new_keys_are_quantised_by_the_descales() -> None:
    q, new = queries(2, 1, 4, 32), queries(2, 1, 2, 32)
    k, v = (torch.zeros(2, 8, 2, 32, device=DEVICE).to(E4M3) for _ in range(2))
    descale = torch.full((2, 2), 0.125, device=DEVICE)
    lengths = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    flash_attn_3.flash_attn_with_kvcache(
        q, k, v, new, new, cache_seqlens=lengths, k_descale=descale, v_descale=descale
    )
    wanted = (new[0, 0].float() / 0.125).to(E4M3)
    assert torch.equal(k[0, 3].float(), wanted.float())
    assert torch.equal(v[1, 0].float(), (new[1, 0].float() / 0.125).to(E4M3).float())


def test_flashinfer_decodes_from_caches_of_8_bits() -> None:
    cache = stored(5, 2, 4, 2, 32)  # 5 pages of keys and values, 4 rows each
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
    indices = torch.tensor([4, 1, 0], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([3, 2], dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=DEVICE), "NHD")
    wrapper.plan(indptr, indices, last, 4, 2, 32, 4, kv_data_type=E4M3)
    q = queries(2, 4, 32)
    found = wrapper.run(q, cache, k_scale=0.05, v_scale=0.5)
    wide = cache.float() * torch.tensor([0.05, 0.5], device=DEVICE)[:, None, None, None]
    wanted = fulmen.attention_paged(
        q[:, None].float(), *wide.unbind(1), (indptr, indices), [7, 2], max_kv=8, layout="bshd"
    )
    torch.testing.assert_close(found.float(), wanted[:, 0], rtol=2e-2, atol=5e-2)
