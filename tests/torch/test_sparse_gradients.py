# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of sparse latent attention: against gradcheck, and against attention of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fulmen
from fulmen._torch import sparse
from fulmen.errors import UnsupportedError

SCALE = 0.3


def drawn(dtype: torch.dtype = torch.float64, dim: int = 9) -> tuple[Any, ...]:
    """q (2, 3, 2, dim), a cache of 3 pages of 4 rows, indices with -1 and rows named often."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 3, 2, dim, dtype=torch.float64, generator=generator).to(dtype)
    kv = torch.randn(3, 4, 1, dim, dtype=torch.float64, generator=generator).to(dtype)
    indices = torch.stack([torch.randperm(12, generator=generator)[:5] for _ in range(6)])
    indices = indices.view(2, 3, 5)
    indices[0, 1, 2] = -1
    indices[1, 0] = -1  # sees nothing
    return q.requires_grad_(), kv.requires_grad_(), indices


def attended(q: Any, kv: Any, indices: Any, counts: Any, dim_v: int, sinks: Any = None) -> Any:
    """The same by operations of torch, without the cache's other rows."""
    entry = torch.arange(indices.shape[-1])
    visible = (indices >= 0) & (entry < counts[..., None])
    rows = kv.reshape(-1, kv.shape[-1])[indices.clamp(min=0)]
    s = torch.einsum("bqhd,bqtd->bqht", q, rows) * SCALE
    s = s.masked_fill(~visible[:, :, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, None, :, None].expand(*s.shape[:3], 1)], dim=-1)
    p = s.softmax(-1).nan_to_num(0)[..., : indices.shape[-1]]
    return torch.einsum("bqht,bqtd->bqhd", p, rows[..., :dim_v])


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradcheck(with_lse: bool):
    q, kv, indices = drawn()

    def call(q: Any, kv: Any) -> Any:
        o, lse = fulmen.attention_mla(
            q, kv, dim_v=6, indices=indices, topk_lengths=torch.tensor([5, 4]), scale=SCALE,
            layout="bshd", return_lse=True,
        )  # fmt: skip
        return (o, lse.clamp(min=-1e3)) if with_lse else o

    assert torch.autograd.gradcheck(call, (q, kv))


@pytest.mark.parametrize("room", [1, 1 << 28])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_and_two_caches(deterministic: bool, room: int, monkeypatch: Any):
    monkeypatch.setattr(sparse, "ROOM_BYTES", room)
    q, kv, indices = drawn()
    other = torch.randn(2, 3, 1, 9, dtype=torch.float64, requires_grad=True)
    more = torch.tensor([0, 5, 3, -1]).expand(2, 3, 4)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    o = fulmen.attention_mla(
        q, kv, dim_v=6, indices=indices, extra_kv=other, extra_indices=more, sinks=sinks,
        scale=SCALE, layout="bshd", deterministic=deterministic,
    )  # fmt: skip
    both = torch.cat([kv.reshape(-1, 1, 1, 9), other.reshape(-1, 1, 1, 9)])
    all_indices = torch.cat([indices, torch.where(more < 0, -1, more + 12)], dim=-1)
    counts = torch.full((2, 3), all_indices.shape[-1])
    expected = attended(q, both, all_indices, counts, 6, sinks)
    torch.testing.assert_close(o, expected)
    do = torch.randn(o.shape, dtype=torch.float64)
    inputs = (q, kv, other, sinks)
    for got, wanted in zip(
        torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do)
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "shd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_layouts(dtype: torch.dtype, layout: str):
    q, kv, indices = drawn(dtype, 24)
    counts = torch.tensor([5, 3])
    call: dict[str, Any] = {"dim_v": 16, "scale": SCALE, "layout": layout}
    if layout == "shd":
        o = fulmen.attention_mla(q.flatten(0, 1), kv, indices=indices.flatten(0, 1), **call)
        o, counts = o.view(2, 3, 2, 16), torch.tensor([5, 5])
    elif layout == "bshd":
        o = fulmen.attention_mla(q, kv, indices=indices, topk_lengths=counts, **call)
    else:
        given = q.transpose(1, 2), kv.transpose(1, 2)
        o = fulmen.attention_mla(*given, indices=indices, topk_lengths=counts, **call)
        o = o.transpose(1, 2)
    wide = [x.detach().double().requires_grad_() for x in (q, kv)]
    expected = attended(*wide, indices, counts[:, None].expand(2, 3), 16)
    do = torch.randn(o.shape).to(dtype)
    tolerance = {"atol": 0.06, "rtol": 0.03} if dtype is torch.bfloat16 else {}
    grads = torch.autograd.grad(o, (q, kv), do)
    for got, wanted in zip(grads, torch.autograd.grad(expected, wide, do.double())):
        assert got.dtype is dtype
        torch.testing.assert_close(got, wanted.to(dtype), **tolerance)


def test_hidden_rows_may_hold_anything():
    q, kv, indices = drawn()
    named = set(indices[indices >= 0].tolist()) - {0}
    hidden = [slot for slot in range(12) if slot not in named]
    with torch.no_grad():
        indices[indices == 0] = -1
        kv.view(12, 9)[hidden] = torch.nan
    o = fulmen.attention_mla(q, kv, dim_v=6, indices=indices, scale=SCALE, layout="bshd")
    dq, dkv = torch.autograd.grad(o.sum(), (q, kv))
    assert torch.isfinite(o).all()
    assert torch.isfinite(dq).all()
    assert (dkv.view(12, 9)[hidden] == 0).all()


def test_refuses_records():
    q = torch.zeros(1, 1, 2, 576, requires_grad=True)
    pool = torch.zeros(1, 4, 1, 656, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="backward does not take records"):
        fulmen.attention_mla(
            q, pool, indices=torch.zeros(1, 1, 2, dtype=torch.int32), layout="bshd"
        )
