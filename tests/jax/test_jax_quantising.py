# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.jax.quantise and hadamard in compiled programs, against NumPy's. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402
from fulmen.errors import DTypeError, ShapeError  # noqa: E402

X = np.random.default_rng(5).standard_normal((2, 40, 3, 32)).astype(np.float32)


def bits(x: Any) -> Any:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head", "row", "channel"])
def test_equals_numpy(compiled: bool, per: str) -> None:
    how: dict[str, Any] = {"per": per, "rotate": True, "headroom": 2.0, "layout": "bshd"}
    lengths = np.array([40, 7], np.int32)

    def found(x: Any, lengths: Any) -> Any:
        return fulmen.jax.quantise(x, "int8", constant="mean", lengths=lengths, **how)

    made = (jax.jit(found) if compiled else found)(jnp.asarray(X), jnp.asarray(lengths))
    wanted = fulmen.quantise(X, "int8", constant="mean", lengths=lengths, **how)
    for a, b in zip(made, wanted):
        assert np.array_equal(bits(a), bits(b))
    later = fulmen.jax.quantise(
        X, "int8", constant=made.constant, scale=made.scale, lengths=lengths, **how
    )
    assert np.array_equal(bits(later.values), bits(wanted.values))
    assert later.scale is made.scale


def test_hadamard_and_its_derivative() -> None:
    x, c = jnp.asarray(X), jnp.ones((3, 1, 32), jnp.float32)
    turn = jax.jit(lambda x: fulmen.jax.hadamard(x.swapaxes(1, 2), constant=c))
    wanted = fulmen.hadamard(X.swapaxes(1, 2), constant=np.ones((3, 1, 32), np.float32))
    assert np.array_equal(np.asarray(turn(x)), wanted)
    gradient = jax.grad(lambda x: (turn(x) ** 2).sum())(x)
    np.testing.assert_allclose(gradient, 2 * (X - 1), atol=1e-4)
    mapped = jax.vmap(lambda y: fulmen.jax.hadamard(y, layout="hsd"))(x)
    np.testing.assert_array_equal(mapped, fulmen.hadamard(X))


def test_refusals() -> None:
    with pytest.raises(DTypeError, match="dtype is 'float16'"):
        fulmen.jax.quantise(X, "float16")
    with pytest.raises(ShapeError, match="x has 3 axes"):
        fulmen.jax.hadamard(X[0])
