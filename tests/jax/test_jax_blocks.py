# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks in JAX programs, and their gradients. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402
from fulmen.masks import blocks  # noqa: E402

LISTS = jnp.asarray([[0, -1], [1, 0]], jnp.int32)


def attend(q: Any, k: Any, v: Any, lists: Any) -> Any:
    return fulmen.jax.attention(q, k, v, mask=blocks(lists, 64), causal=True)


def test_lists_are_traced_arrays() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 2, 100, 8)), jnp.float32) for _ in range(3))
    seen = fulmen.dense_mask(100, 100, causal=True, mask=blocks(np.asarray(LISTS), 64))

    def with_mask(*x: Any) -> Any:
        return fulmen.jax.attention(*x, mask=jnp.asarray(seen))

    np.testing.assert_allclose(jax.jit(attend)(q, k, v, LISTS), with_mask(q, k, v), atol=1e-5)
    found = jax.grad(lambda *x: attend(*x, LISTS).sum(), (0, 1, 2))(q, k, v)
    wanted = jax.grad(lambda *x: with_mask(*x).sum(), (0, 1, 2))(q, k, v)
    for x, y in zip(found, wanted):
        np.testing.assert_allclose(x, y, atol=1e-4)
