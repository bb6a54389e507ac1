# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of 8 bits, q among them: eager, compiled, fake; appended to; what is refused; rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fulmen
from fulmen._torch import ops
from fulmen._torch.ops import Arrays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def stored(dtype: Any, *shape: int) -> Any:
    return (torch.randn(*shape, device=DEVICE) * 30).clamp(-127, 127).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
def test_values_are_scales_times_tensors(dtype: Any, query: Any) -> None:
    q = torch.randn(2, 4, 3, 32, device=DEVICE, dtype=query)
    k, v = stored(dtype, 2, 2, 9, 32), stored(dtype, 2, 2, 9, 32)
    by_head, by_row = torch.rand(2, 1, 1, device=DEVICE) / 9, torch.rand(9, 1, device=DEVICE) / 9
    found = fulmen.attention(q, k, v, k_scale=by_head, v_scale=by_row)
    wanted = fulmen.attention(q.float(), by_head * k.float(), by_row * v.float())
    assert found.dtype is query
    error = 1e-5 if query is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted, rtol=error, atol=error)
    one = fulmen.attention(q, k, v, k_scale=0.5, v_scale=torch.tensor(0.5, device=DEVICE))
    half = torch.full((1,), 0.5, device=DEVICE)
    assert torch.equal(one, fulmen.attention(q, k, v, k_scale=half, v_scale=half))
    ones = torch.ones(1, device=DEVICE)
    assert torch.equal(fulmen.attention(q, k, v), fulmen.attention(q, k, v, k_scale=ones))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("o", [None, torch.float16, torch.float32])
def test_queries_of_8_bits(dtype: Any, o: Any) -> None:
    q, k, v = stored(dtype, 2, 4, 3, 32), stored(dtype, 2, 2, 9, 32), stored(dtype, 2, 2, 9, 32)
    by_head, by_dim = torch.rand(4, 1, 1, device=DEVICE) / 9, torch.rand(2, 1, 32, device=DEVICE)
    scales = {"q_scale": by_head, "k_scale": 0.125, "v_scale": by_dim}

    def program(q: Any) -> Any:
        return fulmen.attention(q, k, v, out_dtype=o, causal=True, **scales)

    found = program(q)
    wide = by_head * q.float(), 0.125 * k.float(), by_dim * v.float()
    assert found.dtype is (o or torch.bfloat16)
    torch.testing.assert_close(found.float(), fulmen.attention(*wide, causal=True), rtol=2e-2,
                               atol=2e-2)  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), found)
    out = torch.empty_like(found)
    fulmen.attention(q, k, v, out=out, causal=True, **scales)
    assert torch.equal(out, found)
    with torch.autocast(DEVICE, torch.float16):
        assert torch.equal(program(q), found)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_graph(dtype: Any) -> None:
    def program(q: Any, k: Any, v: Any, scale: Any) -> Any:
        return fulmen.attention(2 * q, k, v, k_scale=scale, v_scale=0.25)

    torch._dynamo.reset()
    given = (torch.randn(1, 2, 3, 16, device=DEVICE), stored(dtype, 1, 2, 8, 16),
             stored(dtype, 1, 2, 8, 16), torch.rand(2, 1, 1, device=DEVICE))  # fmt: skip
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), program(*given))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_operator(dtype: Any) -> None:
    q, k = torch.randn(1, 2, 3, 16, device=DEVICE), stored(dtype, 1, 2, 8, 16)
    scale = torch.rand(2, 1, 1, device=DEVICE)
    words, code = fulmen.options.settings_of().words, fulmen.layouts.layout_of("bhsd").code
    settings = ops.OpSettings(list(words), code)
    torch.library.opcheck(
        ops.attention, (*Arrays(q, k, k, k_scale=scale), *settings, 1),
        test_utils=("test_faketensor",),  # for the other, torch multiplies 8-bit numbers
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_append_quantises(dtype: Any) -> None:
    def program(k_pages: Any, v_pages: Any, x: Any, scale: Any) -> None:
        fulmen.append_kv(k_pages, v_pages, x, -x, ([[1]], [1]), k_scale=scale, v_scale=2.0)

    torch._dynamo.reset()
    x, scale = torch.randn(1, 1, 2, 8, device=DEVICE) * 9, torch.tensor(0.5, device=DEVICE)
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        k, v = (torch.zeros(2, 1, 4, 8, device=DEVICE).to(dtype) for _ in range(2))
        run(k, v, x, scale)
        ratio = x[0] / 0.5
        wanted = (
            ratio.round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else ratio.to(dtype)
        )
        assert torch.equal(k[1, :, 1:3].float(), wanted.float())
        assert v[1, :, 1:3].float().abs().sum() > 0
        assert k[0].float().abs().sum() == 0


def test_refusals() -> None:
    q, k = torch.randn(1, 2, 3, 16, device=DEVICE), stored(torch.float8_e4m3fn, 1, 2, 8, 16)
    with pytest.raises(
        fulmen.UnsupportedError, match="q requires grad and k has dtype float8_e4m3"
    ):
        fulmen.attention(q.clone().requires_grad_(), k, k)
    with pytest.raises(fulmen.UnsupportedError, match="q requires grad and k_scale is given"):
        fulmen.attention(q.clone().requires_grad_(), k, k, k_scale=1.0)
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    with pytest.raises(fulmen.UnsupportedError, match="v_scale requires grad"):
        fulmen.attention(q, k, k, v_scale=scale)
    with pytest.raises(fulmen.Error, match="q has dtype int32; allowed are float64"):
        fulmen.attention(k.to(torch.int32), k, k)
    with pytest.raises(fulmen.DTypeError, match="k is float32 where q is float8_e4m3fn"):
        fulmen.attention(k, q, q)
    with pytest.raises(fulmen.ArgumentError, match="q_scale is given where q is float32"):
        fulmen.attention(q, k, k, q_scale=2.0)
    with pytest.raises(
        fulmen.UnsupportedError, match="k has dtype float8_e4m3fn inside a transform"
    ):
        torch.func.vmap(lambda x: fulmen.attention(x, k, k))(q[None])
    with torch.autocast(DEVICE, torch.bfloat16):
        assert fulmen.attention(q, k, k).dtype is torch.bfloat16


def test_permission_to_round_leaves_gradients_as_they_are() -> None:
    """Of precision="fp8": gradients and the o that they belong to are those of 16 bits."""
    q, k, v = torch.randn(3, 1, 2, 40, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    found = []
    for precision in ("float32", "fp8"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = fulmen.attention(*leaves, causal=True, precision=precision)
        o.float().square().sum().backward()
        found.append((o, *(x.grad for x in leaves)))
    for plain, permitted in zip(*found):
        assert torch.equal(plain, permitted)

    def program(q: Any, k: Any, v: Any) -> Any:
        return fulmen.attention(q, k, v, causal=True, precision="fp8")

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), program(q, k, v))
