# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits in JAX programs: attention, pages, appends. Skipped without JAX."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402

TYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
RNG = np.random.default_rng(9)


@pytest.mark.parametrize("name", TYPES)
def test_compiled_programs(name: str) -> None:
    q = jnp.asarray(RNG.standard_normal((1, 4, 3, 16)), jnp.bfloat16)
    k, v = jnp.asarray(RNG.standard_normal((2, 1, 2, 7, 16)) * 30, jnp.float32).astype(name)
    scale = jnp.asarray(RNG.random((2, 1, 1)), jnp.float32)

    @jax.jit
    def program(q, k, v, scale, other):  # type: ignore[no-untyped-def]
        return fulmen.jax.attention(q, k, v, k_scale=scale, v_scale=other)

    host = [np.asarray(x) for x in (q, k, v)]
    wanted = fulmen.attention(*host, k_scale=np.asarray(scale), v_scale=0.5)
    np.testing.assert_array_equal(np.asarray(program(q, k, v, scale, 0.5)), wanted)

    table, lengths = np.array([[1, 0]]), np.array([6])
    pools = jnp.asarray(RNG.standard_normal((2, 2, 2, 4, 16)) * 30, jnp.float32).astype(name)
    found = fulmen.jax.attention_paged(q, *pools, table, lengths, k_scale=scale)
    wanted = fulmen.attention_paged(
        host[0], *np.asarray(pools), table, lengths, k_scale=np.asarray(scale)
    )
    np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize("name", TYPES)
def test_queries_of_8_bits(name: str) -> None:
    q, k, v = jnp.asarray(RNG.standard_normal((3, 1, 2, 7, 16)) * 30, jnp.float32).astype(name)
    by_dim = jnp.asarray(RNG.random((2, 1, 16)), jnp.float32)
    scales = {"q_scale": 0.125, "k_scale": 0.25}
    found = jax.jit(lambda *x: fulmen.jax.attention(*x, v_scale=by_dim, **scales))(q, k, v)
    host = [np.asarray(x) for x in (q, k, v)]
    wanted = fulmen.attention(*host, v_scale=np.asarray(by_dim), **scales)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found), wanted)
    wide = fulmen.jax.attention(q, k, v, out_dtype="float32")
    assert wide.dtype == jnp.float32
    with pytest.raises(fulmen.DTypeError, match="out_dtype is float64 where q is"):
        fulmen.jax.attention(q, k, v, out_dtype="float64")


@pytest.mark.parametrize("name", TYPES)
def test_append(name: str) -> None:
    x = RNG.standard_normal((1, 1, 2, 8)).astype(np.float32) * 9
    pools = [np.zeros((2, 1, 4, 8), jnp.dtype(name)) for _ in range(2)]
    found = fulmen.jax.append_kv(
        *(jnp.asarray(pool) for pool in pools), x, -x, ([[1]], [1]), k_scale=0.5, v_scale=2
    )
    fulmen.append_kv(*pools, x, -x, ([[1]], [1]), k_scale=0.5, v_scale=2.0)
    for mine, wanted in zip(found, pools):
        np.testing.assert_array_equal(np.asarray(mine).view(np.uint8), wanted.view(np.uint8))


def test_gradients_are_refused() -> None:
    q, k = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 1, 4, 8), jnp.int8)
    for options in ({}, {"k_scale": 2.0}):
        with pytest.raises(fulmen.UnsupportedError, match="no backward pass"):
            jax.grad(lambda q, o=options: fulmen.jax.attention(q, k, k, **o).sum())(q)


def test_permission_to_round_16_bits() -> None:
    q, k, v = jnp.asarray(RNG.standard_normal((3, 1, 2, 40, 64)), jnp.bfloat16)

    def loss(q, k, v, precision):  # type: ignore[no-untyped-def]
        o = fulmen.jax.attention(q, k, v, causal=True, precision=precision)
        return (o.astype(jnp.float32) ** 2).sum()

    plain, permitted = (
        jax.jit(jax.grad(lambda *x, p=p: loss(*x, p), argnums=(0, 1, 2)))(q, k, v)
        for p in ("float32", "fp8")
    )
    for x, y in zip(plain, permitted):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
