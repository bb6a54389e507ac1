# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen::quantise and fulmen::hadamard: operators, compiled and under autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fulmen
from fulmen.errors import DTypeError, UnsupportedError

SHAPE = (2, 3, 40, 32)


def given() -> Any:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).bfloat16()


def bits(x: Any) -> Any:
    return x.view(torch.uint8).numpy()


def test_equals_numpy():
    x = given()
    found = fulmen.quantise(x, rotate=True, constant="mean", lengths=[40, 7])
    assert found.values.dtype is torch.float8_e4m3fn
    wanted = fulmen.quantise(
        x.float().numpy(), rotate=True, constant="mean", lengths=np.array([40, 7])
    )
    assert np.array_equal(bits(found.values), wanted.values.view(np.uint8))
    assert np.array_equal(found.scale.numpy(), wanted.scale)
    again = fulmen.quantise(x, rotate=True, constant=found.constant, scale=found.scale)
    assert again.scale is found.scale
    assert torch.equal(again.values[0].view(torch.uint8), found.values[0].view(torch.uint8))


@pytest.mark.parametrize("per", ["tensor", "head", "row", "channel"])
def test_operator(per: str):
    for finds in (False, True):
        constant = None if finds else torch.randn(3, 1, 32)
        scale = None if finds else torch.full((1,), 0.01)
        how = ("int8", per, True, finds, finds, 2.0, "bhsd")
        arguments = (given(), scale, constant, torch.tensor([40, 2]), *how)
        torch.library.opcheck(torch.ops.fulmen.quantise.default, arguments)


def test_compiled():
    def cached(x: Any) -> Any:
        made = fulmen.quantise(x, per="row", rotate=True, constant="mean", layout="bshd")
        return *made, fulmen.hadamard(x, constant=made.constant, layout="bshd")

    compiled = torch.compile(cached, fullgraph=True, backend="eager")
    for a, b in zip(cached(given()), compiled(given())):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_hadamard_is_its_own_derivative():
    x = torch.randn(1, 2, 3, 12, requires_grad=True)
    assert torch.autograd.gradcheck(
        fulmen.hadamard, x, eps=1e-2, atol=1e-3, rtol=1e-3, nondet_tol=0
    )
    constant = torch.ones(2, 1, 12)
    fulmen.hadamard(x, constant=constant).sum().backward()
    with torch.no_grad():
        wanted = fulmen.hadamard(torch.ones_like(x))
    torch.testing.assert_close(x.grad, wanted)
    torch.library.opcheck(torch.ops.fulmen.hadamard.default, (x.detach(), constant, "bhsd"))
    mapped = torch.func.vmap(fulmen.hadamard)(x.detach()[None])
    torch.testing.assert_close(mapped[0], fulmen.hadamard(x.detach()))


def test_refusals():
    x = given().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"x requires grad; .*x\.detach\(\)"):
        fulmen.quantise(x)
    with pytest.raises(UnsupportedError, match="constant requires grad; hadamard is"):
        fulmen.hadamard(given(), constant=torch.ones(1, 32, requires_grad=True))
    with pytest.raises(UnsupportedError, match="stream is given with PyTorch tensors"):
        fulmen.quantise(given(), stream=0)
    with pytest.raises(DTypeError, match="dtype is 'uint8'; allowed are float8_e4m3fn"):
        fulmen.quantise(given(), torch.uint8)
