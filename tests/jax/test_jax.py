# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.jax.attention in compiled programs, against attention in plain JAX. Skipped without JAX.

On a machine with a GPU the same tests run there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402


def inputs(dtype: Any = np.float32, rows: int = 7, keys: int = 9) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((2, 4, rows, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def plain(q: Any, k: Any, v: Any, bias: Any = None, sinks: Any = None) -> Any:
    """(o, lse), causal, aligned bottom-right."""
    with jax.default_matmul_precision("highest"):  # a GPU's default is TF32
        return _plain(q, k, v, bias, sinks)


def _plain(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
    s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    s = s if bias is None else s + bias
    visible = jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2])
    s = jnp.where(visible, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, -1)
    total = lse if sinks is None else jnp.logaddexp(lse, sinks[:, None])
    return jnp.exp(s - total[..., None]) @ v, lse


def loss(function: Any) -> Any:
    def value(*args: Any) -> Any:
        o, lse = function(*args)
        return jnp.sin(o).sum() + jnp.cos(lse).sum()

    return value


def ours(q: Any, k: Any, v: Any, bias: Any = None, sinks: Any = None) -> Any:
    return fulmen.jax.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)


def test_compiled_values_and_gradients() -> None:
    bias = jnp.linspace(-1, 1, 63, dtype=jnp.float32).reshape(1, 1, 7, 9)
    args = (*inputs(), bias, jnp.linspace(-1, 1, 4, dtype=jnp.float32))
    for found, expected in zip(jax.jit(ours)(*args), plain(*args)):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
    every = tuple(range(5))
    found = jax.jit(jax.grad(loss(ours), argnums=every))(*args)
    for gradient, expected in zip(found, jax.grad(loss(plain), argnums=every)(*args)):
        np.testing.assert_allclose(gradient, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_the_call_on_numpy(dtype: Any) -> None:
    q, k, v = inputs(dtype)
    found = jax.jit(lambda *x: fulmen.jax.attention(*x, window=3, out_dtype=np.float32))(q, k, v)
    expected = fulmen.attention(*map(np.asarray, (q, k, v)), window=3, out_dtype=np.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=2e-2, rtol=2e-2)


def test_masks_lengths_and_packed_sequences() -> None:
    q, k, v = inputs(rows=9)
    visible = np.random.default_rng(1).random((9, 9)) > 0.3
    given: dict[str, Any] = {"mask": visible, "kv_lengths": np.array([9, 4], np.int32)}
    found = jax.jit(lambda *x: fulmen.jax.attention(*x, **given))(q, k, v)
    expected = fulmen.attention(*map(np.asarray, (q, k, v)), **given)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
    rows = q[0].swapaxes(0, 1)
    cu = jnp.array([0, 4, 9], jnp.int32)
    found = jax.jit(lambda x, cu: fulmen.jax.attention(x, x, x, cu_q=cu, cu_kv=cu, causal=True))(
        rows, cu
    )
    x = np.asarray(rows)
    expected = fulmen.attention_varlen(x, x, x, [0, 4, 9], [0, 4, 9], causal=True)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


def test_dropout_has_fresh_lots_for_each_key_and_those_of_its_numbers() -> None:
    q, k, v = inputs()
    step = jax.jit(lambda key: fulmen.jax.attention(q, k, v, dropout_p=0.5, rng=key))
    first, second = step(jax.random.key(1)), step(jax.random.key(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, step(jax.random.key(1)))
    rng = (2**63 + 5, 7)
    found = fulmen.jax.attention(q, k, v, dropout_p=0.5, rng=rng)
    expected = fulmen.attention(*map(np.asarray, (q, k, v)), dropout_p=0.5, rng=rng)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


def test_vmap_and_layout() -> None:
    q, k, v = inputs()
    many = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    found = jax.vmap(fulmen.jax.attention)(*many)
    for index in range(2):
        alone = fulmen.jax.attention(*(x[index] for x in many))
        np.testing.assert_allclose(found[index], alone, atol=1e-6)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    other = fulmen.jax.attention(*turned, layout="bshd").swapaxes(1, 2)
    np.testing.assert_allclose(other, fulmen.jax.attention(q, k, v), atol=2e-6)


def test_what_is_wrong_is_said_in_one_sentence() -> None:
    q, k, v = inputs()
    with pytest.raises(fulmen.ShapeError, match="layout"):
        fulmen.jax.attention(q[0], k, v)
    with pytest.raises(fulmen.DTypeError, match="k"):
        fulmen.jax.attention(q, k.astype(jnp.float16), v)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"causal": q}, "causal is ArrayImpl of float32"),
        ({"dropout_p": q}, "dropout_p is ArrayImpl"),
        ({"bias": "x"}, "bias is 'x'; an array of numbers"),
        ({"out_dtype": "float16"}, "out_dtype is float16 where q is float32"),
    )
    for options, words in wrong:
        with pytest.raises(fulmen.Error, match=words):
            fulmen.jax.attention(q, k, v, **options)
    with pytest.raises(Exception, match="heads"):
        jax.block_until_ready(fulmen.jax.attention(q[:, :3], k, v))
