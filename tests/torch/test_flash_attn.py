# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's names: every form is the plain one; test_flash_grids.py has its grids."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest
import torch

import fulmen
from fulmen.compat import bert_padding, flash_attn_3, flash_rotary
from fulmen.compat import flash_attn as fa2


def test_packed_forms_are_the_plain_one() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    q, k, v = qkv.unbind(2)
    whole = fa2.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(fa2.flash_attn_qkvpacked_func(qkv, causal=True), whole)
    torch.testing.assert_close(fa2.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), whole)
    torch.testing.assert_close(flash_attn_3.flash_attn_func(q, k, v, causal=True), whole)
    torch.testing.assert_close(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True), whole)
    flat = qkv.flatten(2, 3)
    torch.testing.assert_close(
        flash_attn_3.flash_attn_qkvpacked_func(flat, causal=True, num_heads_q=4), whole
    )
    (gradient,) = torch.autograd.grad(fa2.flash_attn_qkvpacked_func(qkv).sum(), qkv)
    (expected,) = torch.autograd.grad(fa2.flash_attn_func(*qkv.unbind(2)).sum(), qkv)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_through_bert_padding(causal: bool) -> None:
    mask = torch.arange(11) < torch.tensor([[11], [0], [6]])
    q, k, v = (torch.randn(3, 11, 4, 16, requires_grad=True) for _ in range(3))
    rows, indices, cu, longest, used = bert_padding.unpad_input(q, mask)
    packed = [rows, *(bert_padding.unpad_input(x, mask)[0] for x in (k, v))]
    assert (longest, used.tolist(), cu.tolist()) == (11, [11, 0, 6], [0, 11, 11, 17])
    o = fa2.flash_attn_varlen_func(*packed, cu, cu, longest, torch.tensor(longest), causal=causal)
    padded = bert_padding.pad_input(o, indices, 3, 11)
    for entry, length in ((0, 11), (2, 6)):
        alone = fa2.flash_attn_func(
            *(x[entry : entry + 1, :length] for x in (q, k, v)), causal=causal
        )
        torch.testing.assert_close(padded[entry : entry + 1, :length], alone)
    assert padded[1].eq(0).all()
    padded.square().sum().backward()
    assert q.grad[1].eq(0).all()
    assert q.grad[0].abs().sum() > 0
    stacked = torch.stack(packed, 1)
    torch.testing.assert_close(
        fa2.flash_attn_varlen_qkvpacked_func(stacked, cu, longest, causal=causal), o
    )
    torch.testing.assert_close(
        fa2.flash_attn_varlen_kvpacked_func(stacked[:, 0], stacked[:, 1:], cu, cu, causal=causal), o
    )
    torch.testing.assert_close(
        flash_attn_3.flash_attn_varlen_func(*packed, cu, cu, causal=causal), o
    )


def test_fa3_seqused_limits_a_slot_of_cu_seqlens() -> None:
    q, k, v = torch.randn(8, 2, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    cu_q, cu_k = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 12])
    found = flash_attn_3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, seqused_k=torch.tensor([2, 6]), causal=True
    )
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 8), slice(5, 11))):
        alone = fa2.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True)
        torch.testing.assert_close(found[rows], alone[0])


@pytest.mark.parametrize("entries", [None, [2, 0]])
def test_a_contiguous_cache_is_appended_to_in_place(entries: Any) -> None:
    k_cache, v_cache = torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2, 16)
    batch = 3 if entries is None else 2
    index = torch.arange(3) if entries is None else torch.tensor(entries)
    q, k, v = (
        torch.randn(batch, 2, 4, 16),
        torch.randn(batch, 2, 2, 16),
        torch.randn(batch, 2, 2, 16),
    )
    lengths = torch.tensor([0, 8, 5][:batch], dtype=torch.int32)
    before = k_cache.clone()
    o, lse = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True,
        cache_batch_idx=None if entries is None else index,
    )  # fmt: skip
    for b, slot in enumerate(index.tolist()):
        start = int(lengths[b])
        end = start + 2
        torch.testing.assert_close(k_cache[slot, start:end], k[b, : end - start])
        torch.testing.assert_close(k_cache[slot, :start], before[slot, :start])
        torch.testing.assert_close(k_cache[slot, end:], before[slot, end:])
        alone = fa2.flash_attn_func(
            q[b : b + 1], k_cache[slot : slot + 1, :end], v_cache[slot : slot + 1, :end],
            causal=True,
        )  # fmt: skip
        torch.testing.assert_close(o[b : b + 1], alone)
    assert lse.shape == (batch, 4, 2)
    plain = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache[index], v_cache[index], cache_seqlens=7, causal=True
    )
    expected = fa2.flash_attn_func(q, k_cache[index, :7], v_cache[index, :7], causal=True)
    torch.testing.assert_close(plain, expected)


def test_slopes_that_wait_for_a_gradient_get_none_as_in_flash_attention() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    o = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    o.sum().backward()
    assert slopes.grad is None
    constant = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes.data)
    assert torch.equal(o, constant)


def test_what_is_refused_is_refused_by_name() -> None:
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(fulmen.UnsupportedError, match="qv"):
        flash_attn_3.flash_attn_func(x, x, x, qv=x)


def test_the_import_hook() -> None:
    assert importlib.util.find_spec("flash_attn") is None
    fa2.install(version="2.8.4")
    try:
        module = importlib.import_module("flash_attn")
        assert module.flash_attn_func is fa2.flash_attn_func
        assert module.__version__ == importlib.metadata.version("flash-attn") == "2.8.4"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert interface.flash_attn_varlen_func is fa2.flash_attn_varlen_func
        padding = importlib.import_module("flash_attn.bert_padding")
        assert padding.pad_input is bert_padding.pad_input
        assert importlib.import_module("flash_attn_interface").flash_attn_func is (
            flash_attn_3.flash_attn_func
        )
        rotary = importlib.import_module("flash_attn.layers.rotary")
        assert rotary.apply_rotary_emb is flash_rotary.apply_rotary_emb
        with pytest.raises(ImportError, match=r"flash_attn\.losses"):
            importlib.import_module("flash_attn.losses")
    finally:
        fa2.uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
