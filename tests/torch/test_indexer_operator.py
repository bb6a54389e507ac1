# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen::mla_indexer: the operator, compiled and under autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fulmen
from fulmen.errors import ArgumentError


def given() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-3, 4, (2, 3, 8, 16), generator=generator).bfloat16()
    k = torch.randint(-3, 4, (2, 90, 1, 16), generator=generator).bfloat16()
    return q, k, torch.rand(2, 3, 8, generator=generator)


def test_equals_numpy():
    q, k, weights = given()
    found = fulmen.mla_indexer(q, k, weights, 7, causal=True, layout="bshd")
    assert found.dtype is torch.int32
    arrays = (q.float().numpy(), k.float().numpy(), weights.numpy())
    np.testing.assert_array_equal(
        found.numpy(), fulmen.mla_indexer(*arrays, 7, causal=True, layout="bshd")
    )
    lengths = [90, 30]
    short = fulmen.mla_indexer(q, k, weights, 7, kv_lengths=lengths, layout="bshd")
    assert int(short[1].max()) < 90 + 30


def test_operator():
    q, k, weights = given()
    arguments = (q, k, weights, 5, None, torch.tensor([90, 2]), None, True, "bshd")
    torch.library.opcheck(torch.ops.fulmen.mla_indexer.default, arguments)


def test_compiled_and_recorded():
    q, k, weights = given()
    weights.requires_grad_()

    def choose(q: Any, k: Any, weights: Any) -> Any:
        return fulmen.mla_indexer(q, k, weights, 7, layout="bshd")

    found = choose(q, k, weights)
    assert not found.requires_grad
    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, weights), found)


def test_refuses_streams():
    q, k, weights = given()
    with pytest.raises(ArgumentError, match="stream is given with PyTorch tensors"):
        fulmen.mla_indexer(q, k, weights, 5, layout="bshd", stream=0)
