# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.jax.attention_paged in compiled programs, against contiguous keys. Skipped without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402

RNG = np.random.default_rng(3)
TABLE = np.array([[7, 2, 5], [-1, 99, -1], [0, 3, 99]], np.int32)
LENGTHS = np.array([11, 0, 5], np.int32)


def problem() -> list[Any]:
    """q (3, head, row, dim), pools (page, kv_head, row, dim)."""
    shapes = ((3, 4, 2, 8), (8, 2, 4, 8), (8, 2, 4, 8))
    return [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in shapes]


def gathered(q: Any, k: Any, v: Any, **options: Any) -> Any:
    rows = np.clip(TABLE, 0, 7)
    k, v = (np.asarray(x)[rows].swapaxes(1, 2).reshape(3, 2, 12, 8) for x in (k, v))
    return fulmen.attention(np.asarray(q), k, v, kv_lengths=LENGTHS, **options)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


def test_compiled_and_eager() -> None:
    given = problem()

    @jax.jit
    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        return fulmen.jax.attention_paged(
            q, k, v, table, lengths, causal=True, return_lse=True, softcap=3.0
        )

    o, lse = attend(*given, TABLE, LENGTHS)
    wanted, wanted_lse = gathered(*given, causal=True, softcap=3.0, return_lse=True)
    close(o, wanted)
    close(lse, wanted_lse)
    eager = fulmen.attention_paged(*given, jnp.asarray(TABLE), jnp.asarray(LENGTHS), causal=True)
    assert isinstance(eager, jax.Array)
    close(eager, gathered(*given, causal=True))


def test_slots() -> None:
    given = problem()
    slots, lengths = np.array([[9, -1, 31, 0]] * 3, np.int32), np.array([4, 2, 0], np.int32)

    @jax.jit
    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        return fulmen.jax.attention_paged(q, k, v, table, lengths, slots=True)

    whole = [np.asarray(x) for x in given]
    wanted = fulmen.attention_paged(*whole, slots, lengths, slots=True)
    close(attend(*given, slots, lengths), wanted)
    k, v = (x.swapaxes(1, 2).reshape(32, 2, 8)[[9, 31, 0]].swapaxes(0, 1)[None] for x in whole[1:])
    close(wanted[:1], fulmen.attention(whole[0][:1], k, v))


def test_packed_lists_of_pages_and_positions() -> None:
    q, k, v = problem()
    rows = q.swapaxes(1, 2).reshape(6, 4, 8)
    pages = k.swapaxes(1, 2), v.swapaxes(1, 2)
    csr = np.array([0, 3, 3, 5], np.int32), np.array([7, 2, 5, 0, 3], np.int32)
    positions = np.concatenate([n - 2 + np.arange(2) for n in LENGTHS]).astype(np.int32)
    found = jax.jit(
        lambda *x: fulmen.jax.attention_paged(
            *x,
            csr,
            LENGTHS,
            cu_q=np.array([0, 2, 4, 6], np.int32),
            positions=positions,
            max_kv=12,
            causal=True,
        )
    )(rows, *pages)
    close(found, gathered(q, k, v, causal=True).swapaxes(1, 2).reshape(6, 4, 8))


@pytest.mark.parametrize("is_traced", [False, True])
def test_words_of_a_tree(is_traced: bool) -> None:
    q, k, v = problem()
    words: Any = np.array([[0b01, 0b11]] * 3, np.int64)
    if is_traced:
        words = jnp.asarray(words[..., None].view(np.uint32))

    def call(w: Any) -> Any:
        return fulmen.jax.attention_paged(q, k, v, TABLE, LENGTHS, mask=fulmen.masks.tree(w))

    found = jax.jit(call)(words) if is_traced else call(words)
    close(found, gathered(q, k, v, causal=True))


def test_refusals() -> None:
    q, k, v = problem()
    words = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(fulmen.DTypeError, match=r"masks\.tree"):
        fulmen.jax.attention_paged(q, k, v, TABLE, LENGTHS, mask=fulmen.masks.tree(words))
    with pytest.raises(fulmen.ShapeError, match="k has 3 axes"):
        fulmen.jax.attention_paged(q, k[0], v, TABLE, LENGTHS)
    with pytest.raises(fulmen.UnsupportedError, match="page_table"):
        jax.grad(lambda x: fulmen.jax.attention_paged(x, k, v, TABLE, LENGTHS).sum())(q)


def test_keys_that_requests_share() -> None:
    given = problem()
    said = np.array([0], np.int32)
    found = jax.jit(
        lambda *x: fulmen.jax.attention_paged(*x, TABLE, LENGTHS, causal=True, kv_shared=said)
    )(*given)
    close(found, gathered(*given, causal=True))


def test_latents_are_no_copy() -> None:
    q, kv = problem()[:2]

    def attend(q: Any, kv: Any) -> Any:
        return fulmen.jax.attention_mla(q, kv, TABLE, LENGTHS, dim_v=5, causal=True)

    wanted = gathered(q, kv, kv, causal=True)[..., :5]
    close(jax.jit(attend)(q, kv), wanted)
    assert "slice" not in str(jax.make_jaxpr(attend)(q, kv))
    close(attend(q, kv), wanted)
    with pytest.raises(fulmen.ShapeError, match="dim_v is 9"):
        fulmen.jax.attention_mla(q, kv, TABLE, LENGTHS, dim_v=9)


def test_gradients_of_latents_are_those_of_a_slice() -> None:
    q, kv = problem()[:2]
    q = jnp.concatenate([q, q, q])[:8]

    def of_latents(q: Any, kv: Any) -> Any:
        return (fulmen.jax.attention_mla(q, kv, dim_v=5, causal=True) ** 2).sum()

    def of_slices(q: Any, kv: Any) -> Any:
        return (fulmen.jax.attention(q, kv, kv[..., :5], causal=True) ** 2).sum()

    for found, wanted in zip(*(jax.grad(f, (0, 1))(q, kv) for f in (of_latents, of_slices))):
        close(found, wanted)
