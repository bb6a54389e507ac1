# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of 8 bits with NumPy: their values are those of ml_dtypes, times scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen

TYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
RNG = np.random.default_rng(8)


def dtype_of(name: str) -> Any:
    if name == "int8":
        return np.dtype(np.int8)
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))


def stored(name: str, shape: tuple[int, ...]) -> Any:
    return (RNG.standard_normal(shape) * 30).astype(np.float32).astype(dtype_of(name))


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
@pytest.mark.parametrize("name", TYPES)
def test_every_pattern_has_its_value(name: str, implementation: str) -> None:
    """One key alone: o is its value."""
    v = np.arange(256, dtype=np.uint8).view(dtype_of(name)).reshape(1, 1, 1, 256)
    q = np.zeros((1, 1, 1, 256), np.float32)
    k = np.zeros((1, 1, 1, 256), dtype_of(name))
    for scale in (1.0, 0.125):
        o = fulmen.attention(q, k, v, v_scale=scale, implementation=implementation)
        np.testing.assert_array_equal(o, np.float32(scale) * v.astype(np.float32))


@pytest.mark.parametrize("name", TYPES)
def test_the_value_is_scale_times_stored(name: str) -> None:
    """Scales broadcast as NumPy broadcasts, in every layout."""
    q = RNG.standard_normal((2, 4, 3, 32)).astype(np.float32)
    k, v = stored(name, (2, 2, 9, 32)), stored(name, (2, 2, 9, 32))
    for shape in ((1,), (2, 1, 1), (9, 1), (2, 2, 9, 1), (2, 1, 1, 1)):
        scale = RNG.random(shape).astype(np.float32) * 0.1
        wide = [(scale * x.astype(np.float32)).astype(np.float32) for x in (k, v)]
        wanted = fulmen.attention(q, *wide, causal=True)
        found = fulmen.attention(q, k, v, k_scale=scale, v_scale=scale, causal=True)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

        turned = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
        scale = np.swapaxes(scale.reshape((1,) * (4 - scale.ndim) + shape), 1, 2)
        options = {"k_scale": scale, "v_scale": scale, "causal": True, "layout": "bshd"}
        again = fulmen.attention(*turned, **options)
        np.testing.assert_array_equal(np.swapaxes(again, 1, 2), found)
    by_head = np.float32([[0.5], [0.25]])  # (head, 1) of (row, head, dim)
    found = fulmen.attention(*turned, k_scale=by_head, layout="bshd")
    wanted = fulmen.attention(q, k, v, k_scale=by_head[:, None])
    np.testing.assert_array_equal(np.swapaxes(found, 1, 2), wanted)


@pytest.mark.parametrize("name", TYPES)
def test_pages_and_packed_sequences(name: str) -> None:
    q = RNG.standard_normal((2, 2, 4, 16)).astype(np.float16)
    k, v = stored(name, (5, 3, 2, 16)), stored(name, (5, 3, 2, 16))  # 5 pages of 3 rows
    scales = RNG.random((2, 5, 3, 2, 1)).astype(np.float32) * 0.1
    table, lengths = np.array([[4, 0, 99], [2, 3, -1]]), np.array([5, 4])
    options = {"layout": "bshd", "causal": True}
    found = fulmen.attention_paged(
        q, k, v, table, lengths, k_scale=scales[0], v_scale=scales[1], **options
    )
    for b, length in enumerate(lengths):
        keys, values = (
            (s * x.astype(np.float32))[table[b, :2]].reshape(1, 6, 2, 16)[:, :length]
            for s, x in zip(scales, (k, v))
        )
        wide = fulmen.attention(q[b : b + 1].astype(np.float32), keys, values, **options)
        np.testing.assert_allclose(found[b : b + 1].astype(np.float32), wide, rtol=2e-3, atol=2e-3)

    cu = np.array([0, 5, 9])
    rows, k, v = RNG.standard_normal((9, 4, 16)), stored(name, (9, 2, 16)), stored(name, (9, 2, 16))
    rows = rows.astype(np.float32)
    by_row = RNG.random((9, 1, 1)).astype(np.float32) * 0.1
    found = fulmen.attention_varlen(rows, k, v, cu, cu, k_scale=by_row, v_scale=by_row)
    wide = [by_row * x.astype(np.float32) for x in (k, v)]
    wanted = fulmen.attention_varlen(rows, *wide, cu, cu)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_queries_of_8_bits(name: str, rows: int) -> None:
    """The same as of the numbers that they stand for; o in what may be asked for."""
    q, k, v = (
        stored(name, (2, 4, rows, 32)),
        stored(name, (2, 2, 9, 32)),
        stored(name, (2, 2, 9, 8)),
    )
    wide = [x.astype(np.float32) for x in (q, k, v)]
    for q_shape, v_shape in (((1,), (8,)), ((4, 1, 1), (2, 1, 8)), ((2, 4, rows, 1), (2, 1, 1, 8))):
        q_scale, v_scale = (RNG.random(s).astype(np.float32) * 0.01 for s in (q_shape, v_shape))
        scales = {"q_scale": q_scale, "k_scale": 0.5, "v_scale": v_scale, "causal": True}
        found = fulmen.attention(q, k, v, out_dtype="float32", **scales)
        wanted = fulmen.attention(wide[0] * q_scale, wide[1] * 0.5, wide[2] * v_scale, causal=True)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        for o in ("bfloat16", "float16"):
            narrow = fulmen.attention(q, k, v, out_dtype=o, **scales)
            assert narrow.dtype == (np.float16 if o == "float16" else dtype_of(o))
            np.testing.assert_array_equal(narrow, found.astype(narrow.dtype))
    assert fulmen.attention(q, k, v).dtype == dtype_of("bfloat16")
    assert fulmen.attention_forward(q, k, v).lse.dtype == np.float32
    assert "forward" in str(fulmen.explain(q, k, v))
    plan = fulmen.plan(q, k, v, need=(), out_dtype="float16")
    np.testing.assert_array_equal(
        plan.forward(q, k, v).o, fulmen.attention(q, k, v, out_dtype="float16")
    )


@pytest.mark.parametrize("name", TYPES)
def test_append_rounds_as_ml_dtypes_does(name: str) -> None:
    """To nearest, ties to even, and to the largest number beyond it."""
    dtype = dtype_of(name)
    most = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}[name]
    x = np.concatenate([RNG.standard_normal(4000) * 10.0 ** RNG.integers(-6, 6, 4000),
                        [0.0, -0.0, np.inf, -np.inf, most * 1.01, 2.5, 3.5, -0.5]])  # fmt: skip
    x = x.astype(np.float32).reshape(1, 1, -1, 8)
    rows = x.shape[2]
    k, v = np.zeros((2, 1, 1, rows, 8), np.int8).view(dtype)
    for scale in (1.0, 0.3):
        fulmen.append_kv(k, v, x, -x, ([[0]], [0]), k_scale=scale, v_scale=np.float32([scale]))
        ratio = (x / np.float32(scale)).clip(-most, most)
        wanted = np.rint(ratio).astype(dtype) if name == "int8" else ratio.astype(dtype)
        np.testing.assert_array_equal(k.view(np.uint8), wanted.view(np.uint8))
        np.testing.assert_array_equal(v.astype(np.float32), -wanted.astype(np.float32))
    fulmen.append_kv(
        k, v, np.full((1, 1, 1, 8), np.nan, np.float32), x[:, :, :1], np.zeros((1, 1), int)
    )
    assert (
        (k[0, 0, 0] == 0).all() if name == "int8" else np.isnan(k[0, 0, 0].astype(np.float32)).all()
    )


def test_a_cache_that_is_appended_to_is_read_with_the_same_scales() -> None:
    cos, sin = fulmen.rotary_tables(32, 16)
    drawn = RNG.standard_normal((2, 1, 2, 6, 16)).astype(np.float32)
    k_new, v_new = drawn.clip(-2.5, 2.5)  # what the scales below hold
    q = RNG.standard_normal((1, 4, 6, 16)).astype(np.float32)
    table, where = np.array([[1, 0]]), ([[1, 0]], [0])
    pools, scales = np.zeros((2, 2, 2, 4, 16), np.int8), np.float32([0.03, 0.02]).reshape(2, 1, 1)
    same = {"k_scale": scales, "v_scale": scales}
    turned = fulmen.append_kv(*pools, k_new, v_new, where, cos=cos, sin=sin, q=q, **same)
    found = fulmen.attention_paged(turned, *pools, table, [6], causal=True, **same)
    exact = np.zeros((2, 2, 2, 4, 16), np.float32)
    fulmen.append_kv(*exact, k_new, v_new, where, cos=cos, sin=sin)
    wanted = fulmen.attention_paged(turned, *exact, table, [6], causal=True)
    assert 0 < np.abs(found - wanted).max() < 0.03


def test_refusals() -> None:
    x = np.ones((1, 1, 4, 8), np.float32)
    k = np.ones((1, 1, 4, 8), np.int8)
    with pytest.raises(fulmen.DTypeError, match="k is int8 where q is float64"):
        fulmen.attention(x.astype(np.float64), k, k)
    with pytest.raises(
        fulmen.DTypeError, match="v is float32 where k is int8; allowed is the dtype of k"
    ):
        fulmen.attention(x, k, x)
    pool = np.zeros((1, 1, 4, 8), np.int8)
    row = np.ones((1, 1, 1, 8), np.float32)
    with pytest.raises(fulmen.UnsupportedError, match="append_kv computes none: pass a number"):
        fulmen.append_kv(pool, pool.copy(), row, row, [[0]], v_scale="row")
    assert not pool.any()
    with pytest.raises(fulmen.ArgumentError, match="k_scale is given where k is float32"):
        fulmen.attention(x, x, x, k_scale=2.0)
    with pytest.raises(fulmen.DTypeError, match="v_scale is float64; allowed is float32"):
        fulmen.attention(x, k, k, v_scale=np.ones((4, 1)))
    with pytest.raises(fulmen.ShapeError, match=r"k_scale has shape \(3, 1\)"):
        fulmen.attention(x, k, k, k_scale=np.ones((3, 1), np.float32))
    with pytest.raises(TypeError, match="k_scale="):
        fulmen.attention(x, k, k, k_descale=1.0)
    with pytest.raises(fulmen.DTypeError, match="k is float32 where q is int8"):
        fulmen.attention(k, x, x)
    with pytest.raises(fulmen.DTypeError, match="out_dtype is float64 where q is int8; allowed is"):
        fulmen.attention(k, k, k, out_dtype="float64")
    with pytest.raises(fulmen.ArgumentError, match="q_scale is given where q is float32"):
        fulmen.attention(x, k, k, q_scale=2.0)
    with pytest.raises(fulmen.ShapeError, match="v_scale has an extent of 8 along dim_v beside"):
        fulmen.attention(x, k, k, v_scale=np.ones((4, 8), np.float32))
    with pytest.raises(TypeError, match="q_scale="):
        fulmen.attention(x, k, k, q_descale=1.0)
    forward = fulmen.attention_forward(k, k, k)
    with pytest.raises(fulmen.UnsupportedError, match="backward does not take q, k and v of int8"):
        fulmen.attention_backward(forward.o, k, k, k, forward.o, forward.stats)
    forward = fulmen.attention_forward(x, k, k)
    with pytest.raises(fulmen.UnsupportedError, match="backward does not take k and v of int8"):
        fulmen.attention_backward(x, x, k, k, forward.o, forward.stats, need=("q",))
    with pytest.raises(fulmen.DTypeError, match="k_pages is int8 where k_new is float64"):
        fulmen.append_kv(k, k, x.astype(np.float64), x.astype(np.float64), np.zeros((1, 4), int))
    with pytest.raises(fulmen.ArgumentError, match="k_scale is given where k_pages is float32"):
        fulmen.append_kv(x, x.copy(), x, x, np.zeros((1, 4), int), k_scale=1.0)
