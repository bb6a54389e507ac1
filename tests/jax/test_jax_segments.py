# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Segments in JAX programs, traced, and their gradients. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402

RNG = np.random.default_rng(6)
ROWS = [*range(0, 4), *range(12, 16)]


def test_rows_of_a_shard() -> None:
    q, k, v = (jnp.asarray(RNG.standard_normal((2, 2, 16, 8)), jnp.float32) for _ in range(3))

    def part(q: Any, k: Any, v: Any, segments: Any) -> Any:
        q = q[:, :, np.array(ROWS)]
        return fulmen.jax.attention(q, k, v, causal=True, q_segments=segments)

    def whole(q: Any, k: Any, v: Any) -> Any:
        return fulmen.jax.attention(q, k, v, causal=True)[:, :, np.array(ROWS)]

    segments = jnp.asarray([[0, 4, 0], [4, 4, 12]], jnp.int32)
    found = jax.jit(part)(q, k, v, segments)
    np.testing.assert_allclose(found, whole(q, k, v), atol=1e-6)
    gradients = jax.jit(jax.grad(lambda *x: (part(*x) ** 2).sum(), argnums=(0, 1, 2)))
    wanted = jax.grad(lambda *x: (whole(*x) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    for x, y in zip(gradients(q, k, v, segments), wanted):
        np.testing.assert_allclose(x, y, atol=2e-5)
