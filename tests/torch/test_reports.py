# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Public bug reports about what PyTorch adds to a call: modules, autograd, memory, modes.

A test is named by the number that the report has in fulmen.lab.cases.catalogue, where the cases of
all other reports are.
"""

from __future__ import annotations

import pytest
import torch
from reference import inputs
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.compat import sdpa


def same_gradients(found: torch.Tensor, expected: torch.Tensor, leaves: list) -> None:
    """Whether both, and what goes back through them, agree to float32."""
    do = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    pairs = zip(torch.autograd.grad(found, leaves, do), torch.autograd.grad(expected, leaves, do))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_u06_a_row_without_keys_leaves_the_weights_gradients_finite() -> None:
    """pytorch#41508."""
    module = torch.nn.MultiheadAttention(1, 1, batch_first=True)
    x = torch.randn(2, 4, 1)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    band = (torch.arange(4)[:, None] - torch.arange(4)[None]).abs() > 1
    with sdpa.replaced():
        o, _ = module(x, x, x, key_padding_mask=padding, attn_mask=band, need_weights=False)
    o.masked_fill(padding[..., None], 0.0).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in module.parameters())


def test_u21_memory_filled_with_nan_reaches_no_gradient() -> None:
    """xformers#1025."""
    leaves = [torch.randn(124, 12, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    offsets = torch.tensor([0, 64, 124])
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        packed = fulmen.attention_varlen(*leaves, offsets, offsets)
        alone = fulmen.attention(*leaves, layout="shd")
        for o in (packed, alone):
            found = torch.autograd.grad(o.sum(), leaves)
            assert all(x.isfinite().all() for x in (o, *found))
    finally:
        torch.use_deterministic_algorithms(False)


def test_u23_no_rows_and_no_keys_end_no_process() -> None:
    """pytorch#141219."""
    none = torch.randn(7, 7, 0, 7, dtype=torch.float16, requires_grad=True)
    o = sdpa.scaled_dot_product_attention(none, none, none, is_causal=True)
    assert o.shape == none.shape
    assert torch.autograd.grad(o.sum(), none)[0].shape == none.shape
    q = torch.randn(7, 9, 0, 7, dtype=torch.float16)
    with pytest.raises(fulmen.ShapeError, match="9"):
        fulmen.attention(q, none, none, causal=True)
    empty = torch.randn(0, 0, 2, 0)
    with pytest.raises(fulmen.Error):
        fulmen.attention(empty, empty, empty)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "like o of another layout"])
def test_u47_u52_gradients_depend_on_the_values_of_do_alone(kind: str) -> None:
    """flash-attention#355, pytorch#133671."""
    leaves = inputs(dtype=torch.float32)
    if kind == "like o of another layout":
        leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                  for x in leaves]  # fmt: skip
    o = fulmen.attention(*leaves)
    do = {
        "transposed": torch.randn(*o.shape[:2], o.shape[3], o.shape[2]).mT,
        "expanded": torch.randn(o.shape[-1]).expand_as(o),
        "like o of another layout": torch.empty_like(o).normal_(),
    }[kind]
    plain = do.clone(memory_format=torch.contiguous_format)
    expected = torch.autograd.grad(fulmen.attention(*leaves), leaves, plain)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o, leaves, do), expected))


def test_u94_lse_without_gradients_is_the_real_one() -> None:
    """attention-gym#37."""
    q, k, v = inputs(kv_heads=4, dtype=torch.float32, grad=False)
    _, lse = fulmen.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, (q @ k.mT / q.shape[-1] ** 0.5).logsumexp(-1))


def test_u95_u105_u110_what_reaches_a_bias_through_o_and_lse() -> None:
    """pytorch#136232, #148476, #174018."""
    q, k, v = inputs(kv_heads=4, grad=False)
    bias = torch.randn(1, 4, 1, k.shape[2], dtype=torch.float64, requires_grad=True)
    o, lse = fulmen.attention(q, k, v, bias=bias, return_lse=True)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    same_gradients(o * lse.unsqueeze(-1).exp(), scores.exp() @ v, [bias])
    bias = bias.detach().to(torch.bfloat16).requires_grad_()
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    fulmen.attention(q, k, v, bias=bias).sum().backward()
    assert bias.grad.dtype == torch.bfloat16


def test_u108_a_learned_temperature_gets_its_gradient() -> None:
    """pytorch#145208."""
    leaves = inputs(kv_heads=4, dtype=torch.float32)
    temperature = torch.tensor(0.7, requires_grad=True)
    q, k, v = leaves
    found = fulmen.attention(q * temperature, k, v)
    expected = scaled_dot_product_attention(q * temperature, k, v)
    same_gradients(found, expected, [temperature, *leaves])
