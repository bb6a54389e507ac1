# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Segments with PyTorch: autograd and second derivatives, torch.compile, torch.vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import autograd

import fulmen
from fulmen import masks

SEGMENTS = {
    "q_segments": torch.tensor([[0, 3, 0], [3, 4, 8]]),
    "kv_segments": torch.tensor([[[5, 4, 9], [0, 4, 1]], [[0, 9, 2], [0, 0, 0]]]),
}
OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (5, 2), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.2])},
    {"mask": masks.chunks(5), "dropout_p": 0.3, "rng": torch.tensor([5, 6])},
]


def problem() -> list[torch.Tensor]:
    torch.manual_seed(5)
    shapes = ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options: dict[str, Any]) -> None:
    def call(*x: torch.Tensor) -> Any:
        return fulmen.attention(*x, **SEGMENTS, **options)

    assert autograd.gradcheck(call, problem(), fast_mode=True)
    assert autograd.gradgradcheck(call, problem(), fast_mode=True)


def test_packed_second_derivatives() -> None:
    q, k, v = (x[0] for x in problem())
    packed = {"cu_q": torch.tensor([0, 3, 7]), "cu_kv": torch.tensor([0, 5, 9])}
    placed = {"q_segments": torch.tensor([[[0, 3, 4]], [[0, 4, 1]]]),
              "kv_segments": torch.tensor([[[0, 5, 0]], [[1, 3, 2]]])}  # fmt: skip

    def call(*x: torch.Tensor) -> Any:
        return fulmen.attention(*x, layout="hsd", causal=True, **packed, **placed)

    given = [x.detach().requires_grad_() for x in (q, k, v)]
    assert autograd.gradcheck(call, given, fast_mode=True)
    assert autograd.gradgradcheck(call, given, fast_mode=True)


def test_compiled() -> None:
    given = problem()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> Any:
        keys = SEGMENTS["kv_segments"]
        return fulmen.attention(q, k, v, causal=True, q_segments=rows, kv_segments=keys)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (SEGMENTS["q_segments"], torch.tensor([[0, 7, 5], [0, 0, 0]])):
        o, wanted = compiled(*given, rows), call(*given, rows)
        torch.testing.assert_close(o, wanted)
        for x, y in zip(autograd.grad(o.sum(), given), autograd.grad(wanted.sum(), given)):
            torch.testing.assert_close(x, y)


def test_vmap() -> None:
    q, k, v = (x.detach() for x in problem())

    def call(q: torch.Tensor) -> Any:
        return fulmen.attention(q, k, v, causal=True, **SEGMENTS)

    several = torch.stack([q, 2 * q, -q])
    torch.testing.assert_close(torch.vmap(call)(several), torch.stack([call(x) for x in several]))
