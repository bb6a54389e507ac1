# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""append_kv and rotary of PyTorch tensors: operators, compiler, derivatives, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fulmen
from fulmen._torch import appending


def tables(dim: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = fulmen.rotary_tables(16, dim)
    return torch.from_numpy(cos).to(dtype), torch.from_numpy(sin).to(dtype)


def rotated(x: torch.Tensor, positions: Any, cos: Any, sin: Any, interleaved: bool) -> torch.Tensor:
    """The definition in float64, of (batch, head, row, dim)."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    half = cos.shape[1]
    order = torch.arange(2 * half)
    first, second = (order[::2], order[1::2]) if interleaved else (order[:half], order[half:])
    c, s = cos[positions], sin[positions]
    out = x.clone()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def call(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "k_pages": torch.full((5, 2, 4, 8), torch.nan, dtype=dtype),
        "v_pages": torch.full((5, 2, 4, 8), torch.nan, dtype=dtype),
        "k_new": torch.randn(2, 2, 3, 8).to(dtype),
        "v_new": torch.randn(2, 2, 3, 8).to(dtype),
        "slots": (torch.tensor([[3, 1], [0, 4]]), torch.tensor([2, 0])),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_writes_pages_and_rotates(dtype: torch.dtype, interleaved: bool) -> None:
    given = call(dtype)
    cos, sin = tables()
    q = torch.randn(2, 4, 3, 8).to(dtype)
    out = fulmen.append_kv(**given, cos=cos, sin=sin, q=q, interleaved=interleaved)
    place = torch.tensor([[2, 3, 4], [0, 1, 2]])
    for b, (table, length) in enumerate(zip(*given["slots"])):
        wanted = rotated(given["k_new"][b], place[b], cos, sin, interleaved)
        for i in range(3):
            page, row = table[(length + i) // 4], (length + i) % 4
            torch.testing.assert_close(
                given["k_pages"][page, :, row].double(), wanted[:, i], rtol=2.0**-7, atol=1e-6
            )
            assert torch.equal(given["v_pages"][page, :, row], given["v_new"][b, :, i])
        turned = rotated(q[b], place[b], cos, sin, interleaved)
        torch.testing.assert_close(out[b].double(), turned, rtol=2.0**-7, atol=1e-6)
    assert given["k_pages"].isnan().any(-1).sum() == 2 * (5 * 4 - 6)


def test_pool_of_both_and_bshd_and_packed_rows() -> None:
    pool = torch.zeros(4, 2, 3, 1, 8)  # (page, k or v, row, head, dim)
    rows = torch.randn(5, 1, 8)
    cu_new = torch.tensor([0, 2, 5], dtype=torch.int32)
    table = (torch.tensor([0, 1, 2]), torch.tensor([3, 1]))
    fulmen.append_kv(
        pool[:, 0], pool[:, 1], rows, -rows, (table, torch.tensor([0, 0])), cu_new=cu_new
    )
    assert torch.equal(pool[3, 0, :2], rows[:2])
    assert torch.equal(pool[1, 1], -rows[2:])
    assert not pool[[0, 2]].any()


def test_contiguous_caches_by_batch_index() -> None:
    given = call()
    given["slots"] = (None, torch.tensor([1, 0]))
    given["k_new"] = given["k_new"][:, :, :2]
    given["v_new"] = given["v_new"][:, :, :2]
    fulmen.append_kv(**given, batch_index=torch.tensor([4, 2]))
    assert torch.equal(given["k_pages"][4, :, 1:3], given["k_new"][0])
    fulmen.append_kv(**given)
    assert torch.equal(given["v_pages"][1, :, :2], given["v_new"][1])


def test_opcheck() -> None:
    given = call()
    cos, sin = tables()
    (table, lengths), q = given.pop("slots"), torch.randn(2, 4, 3, 8)
    arrays = appending.AppendArrays(
        **given, q_out=torch.empty_like(q), page_table=table, kv_lengths=lengths, cos=cos, sin=sin,
        q=q,
    )  # fmt: skip
    torch.library.opcheck(appending.append_operator, (*arrays, False, "bhsd"))
    x = torch.randn(2, 4, 3, 8, requires_grad=True)
    torch.library.opcheck(appending.rotary_operator, (x, None, cos, sin, True, "bhsd"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_graph_breaks(backend: str) -> None:
    cos, sin = tables()

    def step(given: dict[str, Any], q: torch.Tensor) -> Any:
        q = fulmen.append_kv(**given, cos=cos, sin=sin, q=q)
        return fulmen.rotary(q, None, cos, sin), given["k_pages"] + 1

    plain, compiled = call(), call()
    for name in ("k_new", "v_new"):
        compiled[name] = plain[name]
    q = torch.randn(2, 4, 3, 8)
    wanted = step(plain, q)
    found = torch.compile(step, fullgraph=True, backend=backend)(compiled, q)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(compiled["v_pages"], plain["v_pages"], equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_differentiable(interleaved: bool) -> None:
    cos, sin = tables(6, torch.float64)
    x = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 5, 9], [2, 2, 15]])

    def turn(x: torch.Tensor) -> torch.Tensor:
        return fulmen.rotary(x, positions, cos, sin, interleaved=interleaved)

    wanted = torch.stack(
        [rotated(x[b].detach(), positions[b], cos, sin, interleaved) for b in range(2)]
    )
    torch.testing.assert_close(turn(x).detach(), wanted)
    assert torch.autograd.gradcheck(turn, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(turn, x)
    gradient = torch.func.grad(lambda x: turn(x).pow(2).sum())(x.detach())
    torch.testing.assert_close(gradient, 2 * x.detach())  # a rotation keeps lengths
    mapped = torch.func.vmap(lambda x: fulmen.rotary(x, None, cos, sin))(x.detach()[None])
    torch.testing.assert_close(mapped[0], fulmen.rotary(x.detach(), None, cos, sin))


def test_refusals() -> None:
    given = call()
    cos, sin = tables()
    before = given["k_pages"].clone()
    with pytest.raises(fulmen.UnsupportedError, match="k_new requires grad"):
        fulmen.append_kv(**{**given, "k_new": given["k_new"].requires_grad_()})
    given["k_new"] = given["k_new"].detach()
    with pytest.raises(fulmen.UnsupportedError, match=r"stream is given with PyTorch"):
        fulmen.append_kv(**given, stream=1)
    with pytest.raises(fulmen.UnsupportedError, match=r"stream is given with PyTorch"):
        fulmen.rotary(given["k_new"], None, cos, sin, stream=1)
    with pytest.raises(fulmen.UnsupportedError, match="cos requires grad"):
        fulmen.rotary(given["k_new"], None, cos.requires_grad_(), sin)
    with pytest.raises(fulmen.DTypeError, match="k_new is"):
        fulmen.append_kv(**{**given, "k_new": "rows"})
    with pytest.raises(fulmen.ArgumentError, match=r"kv_lengths\[0\] is 9"):
        fulmen.append_kv(**{**given, "slots": (given["slots"][0], torch.tensor([9, 0]))})
    with pytest.raises(
        fulmen.DTypeError,
        match="k_pages is bfloat16 where k_new is float32; allowed is the dtype of k_new",
    ):
        fulmen.append_kv(**{**given, "k_pages": given["k_pages"].bfloat16()})
    assert torch.equal(given["k_pages"], before) or given["k_pages"].isnan().all()


def test_numpy_and_torch_agree() -> None:
    cos, sin = fulmen.rotary_tables(16, 8)
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 8)).astype(np.float32)
    found = fulmen.rotary(torch.from_numpy(x), [1, 2, 3], cos, sin)
    assert np.array_equal(found.numpy(), fulmen.rotary(x, [1, 2, 3], cos, sin))


def test_an_eager_append_goes_without_the_operator_where_nothing_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the operator was called")

    given, by_operator = call(), call()
    for name in ("k_new", "v_new"):
        by_operator[name] = given[name]
    monkeypatch.setattr(appending, "_is_read_and_plain", lambda _: False)
    fulmen.append_kv(**by_operator)
    monkeypatch.undo()
    monkeypatch.setattr(appending, "append_operator", refused)
    scale = torch.ones((), requires_grad=True)
    product = given["k_pages"] * scale  # keeps the pages for its backward pass
    fulmen.append_kv(**given)
    for name in ("k_pages", "v_pages"):
        torch.testing.assert_close(given[name], by_operator[name], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with pytest.raises(AssertionError, match="the operator"):  # it writes through a negative view
        fulmen.append_kv(**{**call(), "k_pages": torch._neg_view(torch.zeros(5, 2, 4, 8))})
