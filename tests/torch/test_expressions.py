# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks as text with PyTorch: autograd, torch.compile, FlexAttention, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import autograd
from torch.nn.attention.flex_attention import flex_attention

import fulmen
from fulmen.masks import expression


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def problem() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [tensor(2, 4, 7, 8), tensor(2, 2, 9, 8), tensor(2, 2, 9, 8)]


TABLE = "s * (1 + heat) + table[h, clamp(j - p, -5, 5) + 5] + row[i] / (2 + key[j])"


def attend(*tensors: torch.Tensor, **options: Any) -> Any:
    q, k, v, table, heat, row, key = tensors
    score = fulmen.score(TABLE, table=table, heat=heat, row=row, key=key)
    return fulmen.attention(q, k, v, score=score, **options)


def captured() -> list[torch.Tensor]:
    return [tensor(4, 11), tensor(), tensor(7), torch.rand(9, dtype=torch.float64).requires_grad_()]


@pytest.mark.parametrize("options", [{}, {"mask": "j <= p or j < 2"}, {"softcap": 2.0}])
def test_gradcheck(options: dict[str, Any]) -> None:
    assert autograd.gradcheck(
        lambda *x: attend(*x, return_lse=True, **options), (*problem(), *captured()), fast_mode=True
    )


def test_compiled() -> None:
    given = (*problem(), *captured())
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    mask = expression("ids[i] == ids[j] or j < 1", ids=ids)

    def call(*x: torch.Tensor) -> Any:
        return attend(*x, mask=(mask, "j <= p"))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    o, wanted = compiled(*given), call(*given)
    torch.testing.assert_close(o, wanted)
    leaves = [x for x in given if x.requires_grad]
    for x, y in zip(autograd.grad(o.sum(), leaves), autograd.grad(wanted.sum(), leaves)):
        torch.testing.assert_close(x, y)


def test_agrees_with_flex_attention() -> None:
    q, k, v = (x.detach() for x in problem())
    slope = torch.rand(4, dtype=torch.float64)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slope[h] * (i + 2 - j).abs()

    wanted = flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True)
    score = fulmen.score("s - slope[h] * abs(p - j)", slope=slope)
    torch.testing.assert_close(fulmen.attention(q, k, v, score=score), wanted)


def test_second_derivatives_forward_mode_and_vmap_are_refused() -> None:
    q, k, v = problem()

    def call(q: Any) -> Any:
        return fulmen.attention(q, k, v, score="s * 2").sum()

    (first,) = autograd.grad(call(q), q, create_graph=True)
    with pytest.raises(fulmen.UnsupportedError, match="first derivatives in reverse mode alone"):
        first.sum().backward()
    with pytest.raises(fulmen.UnsupportedError, match="no vmap"):
        torch.func.vmap(call)(q[:, None])
    with pytest.raises(fulmen.UnsupportedError, match="reverse mode alone"):
        torch.func.jvp(call, (q,), (q,))


def test_what_is_no_tensor_is_refused() -> None:
    q, k, v = problem()
    with pytest.raises(fulmen.ArgumentError, match="unknown name 'x'"):
        fulmen.attention(q, k, v, score="s + x")
    with pytest.raises(fulmen.DTypeError, match="score is 1; a str"):
        fulmen.attention(q, k, v, score=1)
    o = fulmen.attention(q, k, v, score=fulmen.score("s + t[j]", t=[0.0] * 9))  # a list goes there
    torch.testing.assert_close(o, fulmen.attention(q, k, v))
