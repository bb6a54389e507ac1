# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks as text in JAX programs, and their gradients. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402
from fulmen.masks import expression  # noqa: E402

RNG = np.random.default_rng(5)
IDS = jnp.asarray(RNG.integers(0, 2, 9), jnp.int32)


def problem() -> list[Any]:
    shapes = (*((2, 4, 9, 8),) * 3, (4, 11))
    return [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in shapes]


def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
    score = fulmen.score("s + $a * table[h, clamp(j - p, -5, 5) + 5]", table=table, a=0.5)
    mask = expression("ids[i] == ids[j]", ids=IDS)
    return fulmen.jax.attention(q, k, v, score=score, mask=mask)


def plainly(q: Any, k: Any, v: Any, table: Any) -> Any:
    i, j = np.ogrid[:9, :9]
    s = jnp.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(8.0)
    s = s + 0.5 * table[:, np.clip(j - i, -5, 5) + 5]
    return jax.nn.softmax(jnp.where(IDS[:, None] == IDS, s, -jnp.inf)) @ v


def test_values_and_gradients() -> None:
    given = problem()
    np.testing.assert_allclose(jax.jit(attend)(*given), plainly(*given), atol=1e-5)

    def loss(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))

    for found, wanted in zip(loss(attend)(*given), loss(plainly)(*given)):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_mapped() -> None:
    given = problem()
    mapped = jax.vmap(attend, in_axes=(0, 0, 0, None))(*(x[:, None] for x in given[:3]), given[3])
    np.testing.assert_allclose(mapped[:, 0], attend(*given), atol=1e-6)


def test_a_wrong_text_is_refused_while_the_program_is_traced() -> None:
    q, k, v, _ = problem()
    with pytest.raises(fulmen.ArgumentError, match="unknown name 'x'"):
        fulmen.jax.attention(q, k, v, score="s + x")
