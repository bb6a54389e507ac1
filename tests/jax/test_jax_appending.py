# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.jax.append_kv and rotary in compiled programs, against NumPy's. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402

RNG = np.random.default_rng(5)
COS, SIN = fulmen.rotary_tables(16, 6)
TABLE, LENGTHS = np.array([[4, 0], [2, 99]], np.int32), np.array([3, 1], np.int32)


def rows(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("compiled", [False, True])
def test_append_donates_and_returns_the_caches(compiled: bool) -> None:
    pools, new = rows(2, 5, 4, 2, 8), rows(2, 2, 3, 2, 8)
    q = rows(2, 3, 4, 8)

    def step(k_pages: Any, v_pages: Any, k: Any, v: Any, q: Any, lengths: Any) -> Any:
        return fulmen.jax.append_kv(
            k_pages, v_pages, k, v, (TABLE, lengths), cos=COS, sin=SIN, q=q, interleaved=True,
            layout="bshd",
        )  # fmt: skip

    function = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    given = [jnp.array(x) for x in pools]
    found = function(*given, *map(jnp.asarray, new), jnp.asarray(q), jnp.asarray(LENGTHS))
    assert all(x.is_deleted() for x in given)
    wanted_q = fulmen.append_kv(
        *pools, *new, (TABLE, LENGTHS), cos=COS, sin=SIN, q=q, interleaved=True, layout="bshd"
    )
    for x, wanted in zip(found, (*pools, wanted_q)):
        assert np.array_equal(np.asarray(x), wanted)


def test_what_is_not_donated_is_copied() -> None:
    pools, new = jnp.asarray(rows(2, 5, 2, 4, 8)), jnp.asarray(rows(2, 1, 2, 3, 8))
    before = np.asarray(pools).copy()
    slots = jnp.array([[1, -1, 19]])
    k_pages, v_pages = jax.jit(lambda p, n: fulmen.jax.append_kv(*p, *n, slots))(pools, new)
    assert np.array_equal(np.asarray(pools), before)
    k, v = before.copy()
    fulmen.append_kv(k, v, *np.asarray(new), np.asarray(slots))
    assert np.array_equal(np.asarray(k_pages), k)
    assert np.array_equal(np.asarray(v_pages), v)


def test_contents_are_refused_in_the_run() -> None:
    pools, new = jnp.asarray(rows(2, 5, 2, 4, 8)), jnp.asarray(rows(2, 1, 2, 3, 8))
    with pytest.raises(Exception, match="slots has 20 for row 1 of request 0"):
        fulmen.jax.append_kv(*pools, *new, jnp.array([[0, 20, 1]]))
    with pytest.raises(fulmen.UnsupportedError, match=r"fulmen.jax.append_kv"):
        fulmen.append_kv(*pools, *new, jnp.array([[0, 2, 1]]))
    with pytest.raises(fulmen.ShapeError, match="k_new has 3 axes"):
        fulmen.jax.append_kv(*pools, *new[:, 0], jnp.array([[0, 2, 1]]))


@pytest.mark.parametrize("positions", [None, [[1, 5, 2], [9, 9, 0]]])
def test_rotary_and_its_gradient(positions: Any) -> None:
    x, weights = rows(2, 3, 2, 8), rows(2, 3, 2, 8)

    @jax.jit
    def loss(x: Any) -> Any:
        found = fulmen.jax.rotary(x, positions, COS, SIN, layout="bshd")
        return (found * weights).sum(), found

    gradient, found = jax.grad(loss, has_aux=True)(jnp.asarray(x))
    wanted = fulmen.rotary(x, positions, COS, SIN, layout="bshd")
    assert np.array_equal(np.asarray(found), wanted)
    back = fulmen.rotary(weights, positions, COS, -SIN, layout="bshd")
    assert np.array_equal(np.asarray(gradient), back)
    mapped = jax.vmap(lambda x: fulmen.jax.rotary(x, None, COS, SIN))(jnp.asarray(x)[None])
    assert np.array_equal(np.asarray(mapped)[0], fulmen.rotary(x, None, COS, SIN))
    with pytest.raises(fulmen.UnsupportedError, match="a gradient of cos is asked for"):
        jax.grad(lambda c: fulmen.jax.rotary(jnp.asarray(x), None, c, SIN).sum())(jnp.asarray(COS))
