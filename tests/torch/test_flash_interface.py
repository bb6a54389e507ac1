# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What lies below and beside FlashAttention's public functions: its operators, S_dmask, partial
results, FlashAttention 4's functions, argument orders."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from reference import reference

import fulmen
from fulmen.compat import bert_padding, flash_attn_3, flash_attn_4, flash_interface
from fulmen.compat import flash_attn as fa2

CU_Q, CU_K = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 5, 7, 12])


def arrays(*rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[torch.Tensor]:
    """q, k, v (2, row, head, dim), or packed for one number of rows of each."""
    q_rows, kv_rows = rows
    return [
        torch.randn(2, n, h, dim, requires_grad=True)
        for n, h in ((q_rows, heads), (kv_rows, kv_heads), (kv_rows, kv_heads))
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.3},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "dropout": {"dropout_p": 0.25},
}


def of_operator(options: dict[str, Any]) -> list[Any]:
    """dropout_p to alibi_slopes, in the order of the operators."""
    window = options.get("window_size", (-1, -1))
    return [options.get("dropout_p", 0.0), options.get("softmax_scale"),
            options.get("causal", False), *window, options.get("softcap", 0.0),
            options.get("alibi_slopes")]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_operators_are_the_public_function_and_its_gradients(name: str) -> None:
    q, k, v = arrays(6, 9)
    own = of_operator(OPTIONS[name])
    torch.manual_seed(3)
    o, lse, s, rng = flash_interface._flash_attn_forward(q, k, v, *own, False)
    torch.manual_seed(3)
    expected = fa2.flash_attn_func(q, k, v, **OPTIONS[name])
    assert torch.equal(o, expected)
    assert not o.requires_grad
    assert s is None
    do = torch.randn_like(o)
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = flash_interface._wrapped_flash_attn_backward(
        do, q, k, v, o, lse, *into, *own, False, rng
    )
    torch.testing.assert_close(into, list(torch.autograd.grad(expected, (q, k, v), do)))
    torch.testing.assert_close(softmax_d, (do * o).sum(-1).transpose(1, 2))
    alone = torch.empty_like(k)
    flash_interface._flash_attn_backward(do, q, k, v, o, lse, None, alone, None, *own, False, rng)
    assert torch.equal(alone, into[1])


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_operators_likewise(name: str) -> None:
    q, k, v = (x[0].detach().requires_grad_() for x in arrays(9, 12))
    own = of_operator(OPTIONS[name])
    lengths = (CU_Q, CU_K, 6, torch.tensor(5))
    torch.manual_seed(3)
    o, lse, _, rng = flash_interface._wrapped_flash_attn_varlen_forward(q, k, v, *lengths, *own)
    torch.manual_seed(3)
    expected, own_lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, *lengths, **OPTIONS[name], return_attn_probs=True
    )
    assert torch.equal(o, expected)
    assert torch.equal(lse, own_lse)
    do = torch.randn_like(o)
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = flash_interface._flash_attn_varlen_backward(
        do, q, k, v, o, lse, *into, *lengths, *own, True, rng
    )
    torch.testing.assert_close(into, list(torch.autograd.grad(expected, (q, k, v), do)))
    assert softmax_d.shape == lse.shape


def test_the_backward_pass_of_a_part_takes_o_and_lse_of_the_whole() -> None:
    """Ring attention: each part's gradients from the result over all keys."""
    q, k, v = (x.detach() for x in arrays(6, 10))
    own = of_operator({})
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole, lse, _ = fa2.flash_attn_func(*leaves, return_attn_probs=True)
    do = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, do)
    dq = torch.zeros_like(q)
    for part in (slice(0, 4), slice(4, 10)):
        keys, values = k[:, part], v[:, part]
        into = [torch.empty_like(x) for x in (q, keys, values)]
        flash_interface._flash_attn_backward(
            do, q, keys, values, whole.detach(), lse.detach(), *into, *own, False
        )
        dq += into[0]
        for found, wanted in zip(into[1:], expected[1:]):
            torch.testing.assert_close(found, wanted[:, part])
    torch.testing.assert_close(dq, expected[0])


def test_autograd_functions_apply_as_the_public_ones() -> None:
    q, k, v = arrays(6, 6, kv_heads=4)
    tail = (0.0, None, True, (-1, -1), 0.0, None, False, False, True)
    whole = fa2.flash_attn_func(q, k, v, causal=True)
    qkv, kv = torch.stack([q, k, v], 2), torch.stack([k, v], 2)
    cu, flat = torch.tensor([0, 6, 12]), [x.flatten(0, 1) for x in (q, k, v)]
    o = flash_interface.FlashAttnFunc.apply(q, k, v, *tail)
    assert torch.equal(o, whole)
    assert o.requires_grad
    assert not flash_interface.FlashAttnFunc.apply(q, k, v, *tail[:-1], False).requires_grad
    assert len(flash_interface.FlashAttnFunc.apply(q, k, v, *tail[:-2], True)) == 3
    for found in (
        flash_interface.FlashAttnQKVPackedFunc.apply(qkv, *tail),
        flash_interface.FlashAttnKVPackedFunc.apply(q, kv, *tail),
        flash_interface.FlashAttnVarlenFunc.apply(*flat, cu, cu, 6, 6, *tail[:-1], None, True),
        flash_interface.FlashAttnVarlenQKVPackedFunc.apply(qkv.flatten(0, 1), cu, 6, *tail),
        flash_interface.FlashAttnVarlenKVPackedFunc.apply(
            flat[0], kv.flatten(0, 1), cu, cu, 6, 6, *tail
        ),
    ):
        torch.testing.assert_close(found.reshape(whole.shape), whole)


@pytest.mark.parametrize("dim", [16, 64, 128, 200])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 5)}], ids=str)
def test_s_dmask_gives_back_the_output(options: dict[str, Any], dim: int) -> None:
    """|S| is a probability up to the factor of its tile of keys; its sign says what was dropped."""
    q, k, v = (x.detach().double() for x in arrays(90, 200, dim=dim))
    o, lse, s = fa2.flash_attn_func(q, k, v, dropout_p=0.25, return_attn_probs=True, **options)
    assert s.shape == (2, 4, 90, 200)
    window = options.get("window_size")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    visible = torch.from_numpy(
        fulmen.dense_mask(90, 200, causal=options.get("causal", False), window=window)
    )
    assert s[..., ~visible].eq(0).all()
    scores = heads_first[0] @ heads_first[1].repeat_interleave(2, 1).mT / dim**0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    tile = flash_interface._get_block_size_n("cpu", dim, True, options.get("causal", False))
    tops = torch.stack([x.amax(-1) for x in scores.split(tile, -1)], -1)
    tops = tops.flip(-1).cummax(-1).values.flip(-1).repeat_interleave(tile, -1)[..., :200]
    p = torch.where(visible, s.abs() * torch.exp(tops - lse[..., None]), 0.0)
    torch.testing.assert_close(p, torch.softmax(scores, -1))
    kept = torch.where(s >= 0, p, 0.0) / 0.75
    found = kept @ heads_first[2].repeat_interleave(2, 1)
    torch.testing.assert_close(found.transpose(1, 2), o, atol=1e-4, rtol=1e-4)
    assert abs(float((s[..., visible] < 0).double().mean()) - 0.25) < 0.02


def test_s_dmask_of_packed_sequences_is_that_of_each() -> None:
    q, k, v = (x[0].detach() for x in arrays(9, 12))
    torch.manual_seed(3)
    o, lse, s = fa2.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 6, 5, dropout_p=0.5, return_attn_probs=True
    )
    assert s.shape == (3, 4, 6, 5)
    assert s[1].eq(0).all()
    for b in (0, 2):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        own = s[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys].repeat_interleave(2, 1)) / 4
        p = own.abs() * torch.exp(scores.amax(-1) - lse[:, rows])[..., None]
        kept = torch.where(own >= 0, p, 0.0) * 2
        found = torch.einsum("hqk,khd->qhd", kept, v[keys].repeat_interleave(2, 1))
        torch.testing.assert_close(found, o[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 3, 70])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_combine_is_the_softmax_over_parts(parts: int, dtype: Any) -> None:
    o = torch.randn(parts, 2, 5, 3, 16)
    lse = torch.randn(parts, 2, 3, 10).transpose(-1, -2)[:, :, :5]  # strided
    lse[parts // 2 :, 0] = -torch.inf
    o[parts // 2 :, 0] = torch.nan
    found, found_lse = flash_attn_3.flash_attn_combine(o, lse, out_dtype=dtype)
    weights = torch.softmax(lse, 0).nan_to_num(0.0)[..., None]
    expected = (weights * o.nan_to_num(0.0)).sum(0).to(dtype or torch.float32)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_lse, torch.logsumexp(lse, 0))
    out = torch.empty_like(expected)
    assert flash_attn_3.flash_attn_combine(o, lse, out=out)[0] is out
    torch.testing.assert_close(out, expected)


def test_the_functions_of_flash_attention_4() -> None:
    q, k, v = arrays(6, 9)
    sinks = torch.randn(4, requires_grad=True)
    o, lse = flash_attn_4.flash_attn_func(
        q, k, v, causal=True, window_size=(4, None), learnable_sink=sinks, return_lse=True
    )
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected, expected_lse = reference(*heads_first, causal=True, window=(4, 0), sinks=sinks)
    torch.testing.assert_close(o, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    (found,) = torch.autograd.grad(o.square().sum(), sinks)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), sinks)[0])
    plain = [x.detach() for x in (q, k, v)]
    assert flash_attn_4.flash_attn_func(*plain)[1] is None
    flat = [x.flatten(0, 1) for x in plain]
    o, _ = flash_attn_4.flash_attn_varlen_func(
        *flat, cu_seqlens_q=torch.tensor([0, 6, 12]), cu_seqlens_k=torch.tensor([0, 9, 18])
    )
    torch.testing.assert_close(o.view(2, 6, 4, 16), fa2.flash_attn_func(*plain))
    used = torch.tensor([3, 9])
    o, _ = flash_attn_4.flash_attn_varlen_func(*plain, seqused_k=used)
    torch.testing.assert_close(o[:1], fa2.flash_attn_func(*(x[:1, : (6, 3, 3)[i]]
                               for i, x in enumerate(plain))))  # fmt: skip
    nearest = {"qv": "", "score_mod": "compat.flex", "block_sparse_tensors": "a BlockMask"}
    for name, said in nearest.items():
        with pytest.raises(fulmen.UnsupportedError, match=f"^{name} is given.*{said}"):
            flash_attn_4.flash_attn_varlen_func(*plain, **{name: q})
    with pytest.raises(fulmen.UnsupportedError, match=r"\(-3, 5\)"):
        flash_attn_4.flash_attn_func(*plain, window_size=(-3, 5))
    assert flash_attn_4.flash_attn_func(*plain, window_size=(-1, -1))[0].shape == q.shape


def test_entries_that_hold_several_sequences_are_unpacked() -> None:
    x = torch.randn(3, 6, 2, 8, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert rows.requires_grad


def test_another_order_of_arguments_is_an_error_that_names_cu_seqlens_q() -> None:
    q, k, v = (x[0].detach() for x in arrays(9, 12))
    for function in (fa2.flash_attn_varlen_func, flash_attn_3.flash_attn_varlen_func):
        with pytest.raises(fulmen.ArgumentError, match=r"^cu_seqlens_q is 6;.*vLLM's is another"):
            function(q, k, v, 6, CU_Q, 5, CU_K)
    with pytest.raises(fulmen.ArgumentError, match=r"^cu_seqlens_q is 6"):
        flash_interface._flash_attn_varlen_forward(
            q, k, v, 6, CU_Q, 5, CU_K, 0.0, None, False
        )  # fmt: skip
    with pytest.raises(fulmen.ArgumentError, match=r"^cu_seqlens_k is None"):
        flash_attn_4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=CU_Q)
    with pytest.raises(fulmen.UnsupportedError, match="rng_state"):
        flash_interface._flash_attn_backward(
            q, q, k, v, q, q, None, None, None, 0.5, None, False, -1, -1, 0.0, None, False
        )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("flash_attn.flash_attn_interface",
         ["flash_attn_func", "flash_attn_varlen_func", "_flash_attn_forward",
          "_flash_attn_varlen_backward", "_wrapped_flash_attn_backward", "FlashAttnVarlenFunc"]),
        ("flash_attn.bert_padding", ["unpad_input_for_concatenated_sequences"]),
        ("flash_attn.cute", ["flash_attn_func", "flash_attn_varlen_func"]),
        ("flash_attn.cute.interface", ["flash_attn_func"]),
        ("flash_attn_interface", ["flash_attn_combine", "get_scheduler_metadata"]),
        ("flash_attn_3", ["flash_attn_func"]),
    ],
)  # fmt: skip
def test_imports_find_them(module: str, names: list[str]) -> None:
    fa2.install()
    try:
        found = importlib.import_module(module)
        assert all(callable(getattr(found, name)) or hasattr(getattr(found, name), "apply")
                   for name in names)  # fmt: skip
        if module == "flash_attn.flash_attn_interface":
            assert found.USE_TRITON_ROCM is False  # FlashAttention's own tests import it
    finally:
        fa2.uninstall()
