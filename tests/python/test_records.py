# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Records of latent attention: append_kv writes them, attention_mla reads them and others' too."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fulmen
from fulmen.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from fulmen.lab.cases.records import LAYOUTS, ROTARY, put, record

RNG = np.random.default_rng(7)
SIZES = [656, 584]


def drawn(*shape: int) -> Any:
    """Numbers of several magnitudes."""
    return RNG.standard_normal(shape) * 2.0 ** RNG.integers(-6, 7, (*shape[:-1], 1))


def pool_of(pages: int, rows: int, size: int) -> tuple[Any, Any]:
    """A pool (page, row, 1, size) as another library has written it, and its values."""
    records, values = record(drawn(pages, rows, LAYOUTS[size][0]), size)
    pool = np.empty((pages, rows, 1, size), np.uint8)
    for page, row in np.ndindex(pages, rows):
        put(pool[page, :, 0], row, records[page, row])
    return pool, values


def attended(q: Any, rows: Any, scale: float) -> Any:
    s = np.einsum("hd,kd->hk", q, rows) * scale
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p @ rows[:, :512] / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("implementation", ["tiled", "scalar"])
@pytest.mark.parametrize("size", SIZES)
def test_reading(size: int, implementation: str):
    pool, values = pool_of(6, 5, size)
    dims = LAYOUTS[size][0]
    q = (RNG.standard_normal((2, 1, 3, dims)) / 8).astype(np.float32)
    options: Any = {"layout": "bshd", "scale": 0.1, "implementation": implementation}
    for kind in (np.uint8, np.int8, ml_dtypes.float8_e4m3fn):
        table, lengths = np.array([[4, 1, 0], [2, 5, 3]]), np.array([13, 6])
        o = fulmen.attention_mla(q, pool.view(kind), table, lengths, **options)
        for b, n in enumerate(lengths):
            rows = values[table[b]].reshape(-1, dims)[:n]
            np.testing.assert_allclose(o[b, 0], attended(q[b, 0], rows, 0.1), rtol=2e-4, atol=1e-4)
    indices = np.array([[[29, 0, -1, 7]], [[3, 3, 12, -1]]], np.int32)
    o = fulmen.attention_mla(q, pool, indices=indices, **options)
    for b in range(2):
        rows = values.reshape(-1, dims)[indices[b, 0][indices[b, 0] >= 0]]
        np.testing.assert_allclose(o[b, 0], attended(q[b, 0], rows, 0.1), rtol=2e-4, atol=1e-4)
    many = np.repeat(q, 7, axis=2).repeat(20, axis=1)  # more rows than are split by keys
    o = fulmen.attention_mla(many, pool, np.array([[4, 1, 0]] * 2), [13, 13], **options)
    rows = values[[4, 1, 0]].reshape(-1, dims)[:13]
    np.testing.assert_allclose(
        o[1, 19, 20:], attended(q[1, 0, 2:], rows, 0.1), rtol=2e-4, atol=1e-4
    )


def power(group: Any) -> Any:
    """The scale by which append_kv stores a group."""
    largest = np.abs(group).max(axis=-1, keepdims=True)
    return np.exp2(np.ceil(np.log2(np.maximum(np.float32(largest) / np.float32(448), 1e-4))))


def expected(x: Any, size: int, turned: Any) -> Any:
    dims, group = LAYOUTS[size]
    groups = x[..., : dims - ROTARY].reshape(*x.shape[:-1], -1, group)
    scale = power(groups)
    stored = (groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    rotary = turned.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([stored.reshape(*x.shape[:-1], -1), rotary], axis=-1)


def read(pool: Any, dims: int, slot: int) -> Any:
    """The values of a record, one by one: what attention to it alone returns."""
    q = np.zeros((1, 1, 1, dims), np.float32)
    return fulmen.attention_mla(q, pool, indices=[[[slot]]], layout="bshd")[0, 0, 0]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_writing(size: int, interleaved: bool):
    dims = LAYOUTS[size][0]
    x = drawn(2, 3, 1, dims).astype(ml_dtypes.bfloat16)
    x[0, 1] = 0
    q = drawn(2, 3, 4, dims).astype(ml_dtypes.bfloat16)
    pool = np.full((4, 5, 1, size), 0xEE, np.uint8)
    before = pool.copy()
    cos, sin = fulmen.rotary_tables(32, ROTARY)
    slots = np.array([[19, 0, -1], [7, 8, 12]])
    positions = np.array([[3, 9, 31], [0, 5, 6]])
    turned_q = fulmen.append_kv(
        pool, None, x, None, slots, cos=cos, sin=sin, positions=positions, q=q, layout="bshd",
        interleaved=interleaved,
    )  # fmt: skip
    tables = (positions, cos, sin)
    turned = fulmen.rotary(
        np.ascontiguousarray(x[..., -ROTARY:]), *tables, layout="bshd", interleaved=interleaved
    )
    wanted_q = q.copy()
    wanted_q[..., -ROTARY:] = fulmen.rotary(
        np.ascontiguousarray(q[..., -ROTARY:]), *tables, layout="bshd", interleaved=interleaved
    )
    np.testing.assert_array_equal(turned_q.view(np.uint16), wanted_q.view(np.uint16))
    wanted = expected(x.astype(np.float64), size, turned.astype(np.float64))
    for (b, i), slot in np.ndenumerate(slots):
        if slot >= 0:
            np.testing.assert_array_equal(read(pool, dims, slot), wanted[b, i, 0, :512])
    if size == 656:
        for slot in set(range(20)) - set(slots.ravel().tolist()):
            assert (pool[slot // 5, slot % 5] == before[slot // 5, slot % 5]).all()
        again = np.full_like(pool, 0xEE)
        fulmen.append_kv(again, None, x, None, slots, layout="bshd")
        assert (again[..., :528] == pool[..., :528]).all()


@pytest.mark.parametrize("size", SIZES)
def test_extremes(size: int):
    dims = LAYOUTS[size][0]
    x = np.zeros((1, 1, 1, dims), np.float32)
    x[..., :6] = [1e30, -3e38, 448, np.nan, 1e-30, -0.0]
    pool = np.zeros((1, 1, 1, size), np.uint8)
    fulmen.append_kv(pool, None, x, None, [[0]])
    stored = dims - ROTARY
    numbers = pool[0, 0, 0, :stored].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isnan(numbers[3])
    assert numbers[1] == -224  # 3e38 over the largest scale, 2^120
    assert (numbers[6:] == 0).all()
    at = slice(stored, stored + 4) if size == 656 else slice(576, 577)
    scale = pool[0, 0, 0, at]
    exponent = int(np.log2(scale.view(np.float32)[0])) if size == 656 else int(scale[0]) - 127
    assert exponent == 120


def test_refusals():
    pool, _ = pool_of(2, 4, 656)
    q = np.zeros((1, 1, 2, 576), np.float32)
    given = (np.array([[0, 1]]), np.array([5]))
    call = fulmen.attention_paged
    with pytest.raises(ShapeError, match="q has head dim 500 where k is uint8, records"):
        call(q[..., :500], pool, pool[..., :512], *given, layout="bshd")
    with pytest.raises(ShapeError, match=r"k has shape .*656\) where .*dim_qk = 584"):
        call(q[..., :512], pool, pool[..., :512], *given, layout="bshd")
    with pytest.raises(ArgumentError, match="v has other strides than k; of records"):
        call(q, pool, pool[..., :512].copy(), *given, layout="bshd")
    with pytest.raises(ArgumentError, match="k_scale is given where k is uint8"):
        call(q, pool, pool[..., :512], *given, layout="bshd", k_scale=2.0)
    with pytest.raises(DTypeError, match="k is uint8 where q is float64"):
        call(q.astype(np.float64), pool, pool[..., :512], *given, layout="bshd")
    apart = np.zeros((2, 4, 1, 600), np.uint8)[..., :584]
    with pytest.raises(ArgumentError, match="rows of a page 584 bytes apart"):
        call(q[..., :512], apart, apart[..., :512], *given, layout="bshd")
    new = np.zeros((1, 1, 1, 576), np.float32)
    with pytest.raises(ArgumentError, match="v_new is given where k_pages is uint8, records"):
        fulmen.append_kv(pool, pool.copy(), new, new, [[0]], layout="bshd")
    with pytest.raises(ShapeError, match="k_new has head dim 500 where k_pages is uint8, records"):
        fulmen.append_kv(pool, None, new[..., :500], None, [[0]], layout="bshd")
    cos = np.zeros((4, 16), np.float32)
    with pytest.raises(ShapeError, match="the last 64 numbers of a record rotate: 32"):
        fulmen.append_kv(
            pool, None, new, None, [[0]], cos=cos, sin=cos, positions=[0], layout="bshd"
        )
    with pytest.raises(ArgumentError, match="k_scale is given where k_pages is uint8"):
        fulmen.append_kv(pool, None, new, None, [[0]], layout="bshd", k_scale=1.0)
    x, records = np.zeros((1, 1, 4, 576), np.float32), np.zeros((1, 1, 4, 656), np.uint8)
    o, _, stats = fulmen.attention_forward(x, records, records[..., :512])
    with pytest.raises(UnsupportedError, match="backward does not take"):
        fulmen.attention_backward(o, x, records, records[..., :512], o, stats)
    half: Any = (x.astype(np.float16), records, records[..., :512])
    with pytest.raises(UnsupportedError, match="sm80: does not take k of records"):
        fulmen.explain(*half, device_name="a100", implementation="sm80")
