# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks with PyTorch: autograd, torch.compile, derivatives by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fulmen
from fulmen.masks import blocks

LISTS = torch.tensor([[[0, -1], [1, 0]], [[1, -1], [0, 0]]], dtype=torch.int32)  # 2 heads of k


def problem() -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = ((4, 70), (2, 80), (2, 80))
    return [torch.randn(2, *shape, 4, dtype=torch.float64, requires_grad=True) for shape in shapes]


def attend(q: Any, k: Any, v: Any) -> Any:
    return fulmen.attention(q, k, v, mask=blocks(LISTS, 64), causal=True)


def dense(q: Any, k: Any, v: Any) -> Any:
    seen = torch.from_numpy(
        fulmen.dense_mask(70, 80, causal=True, mask=blocks(LISTS, 64), heads=4, batch=2)
    )
    return fulmen.attention(q, k, v, mask=seen)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled: bool) -> None:
    given = problem()
    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    o, wanted = call(*given), dense(*given)
    torch.testing.assert_close(o, wanted)
    seed = torch.randn_like(o)
    found = torch.autograd.grad(o, given, seed)
    for x, y in zip(found, torch.autograd.grad(wanted, given, seed)):
        torch.testing.assert_close(x, y)


def test_second_derivatives() -> None:
    given = problem()

    def twice(call: Any) -> Any:
        (first,) = torch.autograd.grad(call(*given).square().sum(), given[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for x, y in zip(twice(attend), twice(dense)):
        torch.testing.assert_close(x, y)


def test_packed_sequences_have_second_derivatives() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(100, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 30, 100], dtype=torch.int32)
    lists = torch.tensor([[[[0], [0]]], [[[1], [0]]]])

    def packed(*x: Any) -> Any:
        mask = blocks(lists, 64)
        return fulmen.attention_varlen(*x, offsets, offsets, max_q=70, max_kv=70, mask=mask)

    def apart(*x: Any) -> Any:
        parts = []
        for n, (first, last) in enumerate(((0, 30), (30, 100))):
            one = [y[None, first:last] for y in x]
            ids = lists[n, :, : -(-(last - first) // 64)]
            parts.append(fulmen.attention(*one, mask=blocks(ids, 64), layout="bshd")[0])
        return torch.cat(parts)

    def twice(call: Any) -> Any:
        o = call(q, k, v)
        (first,) = torch.autograd.grad(o.square().sum(), [q], create_graph=True)
        return o, *torch.autograd.grad(first.square().sum(), [q, k, v])

    for x, y in zip(twice(packed), twice(apart)):
        torch.testing.assert_close(x, y)
