# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The Python side of the attention calls: layouts, dtypes, views, out, and what options mean.

What the numbers should be is tests/cases' matter; here one way to write a call is compared with
another, and with the oracle where there is no other.
"""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fulmen
from fulmen import masks
from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.visible import Options, Problem

BF16 = np.dtype(ml_dtypes.bfloat16)
GENERATOR = np.random.default_rng(0)
Q = GENERATOR.standard_normal((2, 4, 7, 16)).astype(np.float32)
K, V = GENERATOR.standard_normal((2, 2, 2, 9, 16)).astype(np.float32)
DO = GENERATOR.standard_normal(Q.shape).astype(np.float32)

# From (batch, head, row, dim) to a layout, for the first batch entry and head where axes are gone.
TO_LAYOUT = {
    "bhsd": lambda x: x,
    "bshd": lambda x: x.swapaxes(1, 2),
    "hsd": lambda x: x[0],
    "shd": lambda x: x[0].swapaxes(0, 1),
    "sd": lambda x: x[0, 0],
}


def gradients(do: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    forward = fulmen.attention_forward(q, k, v, **options)
    got = fulmen.attention_backward(do, q, k, v, forward.o, forward.stats, **options)
    return (*forward[:2], *got[:3])


@pytest.mark.parametrize("layout", TO_LAYOUT)
@pytest.mark.parametrize("copied", [False, True])
def test_layouts_name_the_same_numbers(layout: str, copied: bool) -> None:
    to = TO_LAYOUT[layout]
    q, k, v, do = (np.ascontiguousarray(to(x)) if copied else to(x) for x in (Q, K, V, DO))
    got = gradients(do, q, k, v, causal=True, layout=layout)
    heads = 1 if layout == "sd" else 4
    kv_heads = 1 if layout == "sd" else 2
    batch = 2 if layout[0] == "b" else 1
    whole = (DO[:batch, :heads], Q[:batch, :heads], K[:batch, :kv_heads], V[:batch, :kv_heads])
    want = gradients(*whole, causal=True)
    for x, y, name in zip(got, want, ("o", "lse", "dq", "dk", "dv")):
        same = {3: y, 2: y[0], 1: y[0, 0]}[x.ndim] if name == "lse" else to(y)
        np.testing.assert_array_equal(x, same)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_dtypes_of_results_and_the_error_rule(dtype: Any, implementation: str) -> None:
    q, k, v, do = (x.astype(dtype) for x in (Q, K, V, DO))
    o, lse, dq, dk, dv = gradients(do, q, k, v, implementation=implementation)
    assert {x.dtype for x in (o, dq, dk, dv)} == {np.dtype(dtype)}
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    oracle = consult(Problem(q, k, v, Options(), do=do), np.dtype(dtype).name)
    for name, x in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        verdict = judge(name, x, oracle)
        assert verdict.passed, f"{name}: {verdict.message}"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_read_only_and_broadcast_inputs(dtype: Any) -> None:
    one = Q[:, :1].astype(dtype)
    many = np.broadcast_to(one, (2, 4, 7, 16))
    k, v = K.astype(dtype), V.astype(dtype)
    for x in (k, v):
        x.flags.writeable = False
    mask = np.broadcast_to(np.array(True), (7, 9))
    o = fulmen.attention(many, k, v, mask=mask)
    np.testing.assert_array_equal(o, fulmen.attention(np.array(many), np.array(k), np.array(v)))


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_sixteen_bits_into_float32(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    wide = fulmen.attention(q, k, v, out_dtype=np.float32)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.astype(dtype), fulmen.attention(q, k, v))
    for spelled in ("float32", np.dtype(np.float32)):
        np.testing.assert_array_equal(fulmen.attention(q, k, v, out_dtype=spelled), wide)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_out_of_any_strides(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    buffer = np.full((2, 7, 4, 33), 5, dtype)
    out = buffer[..., 1:17].swapaxes(1, 2)
    o, lse = fulmen.attention(q, k, v, out=out, return_lse=True)
    assert o is out
    np.testing.assert_array_equal(out, fulmen.attention(q, k, v))
    assert lse.shape == (2, 4, 7)
    assert (buffer[..., 0] == 5).all()
    assert (buffer[..., 17:] == 5).all()


def test_bfloat16_out_of_float32_call_is_refused() -> None:
    with pytest.raises(fulmen.DTypeError):
        fulmen.attention(Q, K, V, out=np.zeros(Q.shape, BF16))


@pytest.mark.parametrize(
    ("window", "causal", "pair"),
    [
        (None, False, (-1, -1)),
        (3, True, (3, 0)),
        (3, False, (3, 3)),
        (-1, True, (-1, -1)),
        ((None, 2), False, (-1, 2)),
        ([2, None], False, (2, -1)),
        ((2, -1), True, (2, 0)),
        (np.int64(3), False, (3, 3)),
    ],
)
def test_ways_to_say_a_window(window: Any, causal: bool, pair: tuple[int, int]) -> None:
    got = fulmen.dense_mask(7, 9, causal=causal, window=window)
    i, j = np.arange(7)[:, None] + 2, np.arange(9)
    left, right = pair
    want = (left < 0) | (j >= i - left)
    want = want & ((right < 0) | (j <= i + right))
    if causal:
        want = want & (j <= i)
    np.testing.assert_array_equal(got, want)


def test_masks_in_a_tuple_must_all_hold() -> None:
    ids = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2], np.int32)
    visible = np.random.default_rng(1).random((2, 1, 7, 9)) < 0.8
    parts = (masks.prefix(2), masks.documents(ids[:7], ids), masks.chunks(4), visible)
    matrix = fulmen.dense_mask(7, 9, causal=True, mask=parts)
    assert matrix.shape == (2, 1, 7, 9)
    got = fulmen.attention(Q, K, V, causal=True, mask=parts)
    np.testing.assert_allclose(got, fulmen.attention(Q, K, V, mask=matrix), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got, fulmen.attention(Q, K, V, causal=True, mask=list(parts)))


def test_documents_default_to_the_ids_of_the_queries() -> None:
    ids = [0, 0, 1, 1, 1, 2, 2]
    k, v = K[:, :, :7], V[:, :, :7]
    got = fulmen.attention(Q, k, v, mask=masks.documents(ids))
    want = fulmen.attention(Q, k, v, mask=masks.documents(np.array(ids), np.array(ids, np.int32)))
    np.testing.assert_array_equal(got, want)


def test_lengths_as_lists_and_arrays() -> None:
    got = fulmen.attention(Q, K, V, q_lengths=[7, 3], kv_lengths=(4, 9))
    lengths = {"q_lengths": np.array([7, 3]), "kv_lengths": np.array([4, 9], np.int32)}
    np.testing.assert_array_equal(got, fulmen.attention(Q, K, V, **lengths))
    assert (got[1, :, 3:] == 0).all()


def test_packed_is_each_sequence_alone() -> None:
    q, k, v = (x[0].swapaxes(0, 1) for x in (Q, K, V))  # (row, head, dim)
    cu_q, cu_kv = [0, 2, 2, 6], [0, 3, 5, 8]
    options: dict[str, Any] = {"causal": True}
    o, lse = fulmen.attention_varlen(q, k, v, cu_q, cu_kv, return_lse=True, **options)
    for i in range(3):
        rows, columns = slice(*cu_q[i : i + 2]), slice(*cu_kv[i : i + 2])
        alone = fulmen.attention(
            q[rows], k[columns], v[columns], layout="shd", return_lse=True, **options
        )
        np.testing.assert_array_equal(o[rows], alone[0])
        np.testing.assert_array_equal(lse[:, rows], alone[1])
    assert (o[6] == 0).all()
    assert (lse[:, 6] == -np.inf).all()
    heads_first = fulmen.attention_varlen(
        *(x.swapaxes(0, 1) for x in (q, k, v)),
        cu_q,
        cu_kv,
        layout="hsd",
        max_q=4,
        max_kv=3,
        **options,
    )
    np.testing.assert_array_equal(heads_first.swapaxes(0, 1), o)
    forward = fulmen.attention_forward(q, k, v, cu_q=cu_q, cu_kv=cu_kv, **options)
    np.testing.assert_array_equal(forward.o, o)


def test_gradients_each_alone_and_from_lse() -> None:
    bias = GENERATOR.standard_normal((4, 1, 9)).astype(np.float32)
    sinks = GENERATOR.standard_normal(4).astype(np.float32)
    options: dict[str, Any] = {"bias": bias, "sinks": sinks}
    forward = fulmen.attention_forward(Q, K, V, **options)
    call = (DO, Q, K, V, forward.o)
    names = ("q", "k", "v", "bias", "sinks")
    every = fulmen.attention_backward(*call, forward.stats, need=names, **options)
    assert every.dbias.shape == bias.shape
    assert every.dsinks.shape == sinks.shape
    for name in names:
        alone = fulmen.attention_backward(*call, forward.stats, need=name, **options)
        for other, x, y in zip(names, alone, every[:5]):
            if other == name:
                np.testing.assert_array_equal(x, y)
            else:
                assert x is None
    from_lse = fulmen.attention_backward(*call, forward.lse, need=names, **options)
    for x, y in zip(from_lse[:5], every[:5]):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_dlse_is_the_gradient_through_lse() -> None:
    forward = fulmen.attention_forward(Q, K, V)
    none = np.zeros_like(DO)
    got = fulmen.attention_backward(
        none, Q, K, V, forward.o, forward.stats, need="q", dlse=np.ones_like(forward.lse)
    )
    step = np.float32(1e-2) * np.sign(got.dq)
    up, down = (fulmen.attention_forward(Q + sign * step, K, V).lse for sign in (1, -1))
    slope = (up.astype(float) - down).sum() / 2
    np.testing.assert_allclose(slope, np.abs(got.dq * step).sum(), rtol=1e-3)


def test_dropout_depends_on_rng_alone() -> None:
    options: dict[str, Any] = {"dropout_p": 0.5}
    a = fulmen.attention(Q, K, V, rng=(1, 2), **options)
    np.testing.assert_array_equal(a, fulmen.attention(Q, K, V, rng=[1, 2], **options))
    assert (a != fulmen.attention(Q, K, V, rng=(2**64 - 1, 2), **options)).any()
    assert (a != fulmen.attention(Q, K, V, rng=(1, 3), **options)).any()
    gone = fulmen.attention(Q, K, V, dropout_p=1, rng=(0, 0))
    assert (gone == 0).all()


def test_numpy_numbers_are_numbers() -> None:
    got = fulmen.attention(Q, K, V, scale=np.float32(0.25), softcap=np.float64(3), causal=np.True_)
    np.testing.assert_array_equal(got, fulmen.attention(Q, K, V, scale=0.25, softcap=3, causal=1))


def test_merge_in_every_layout_and_order() -> None:
    whole, lse = fulmen.attention(Q, K, V, return_lse=True)
    parts = [
        fulmen.attention(Q, K[:, :, a:b], V[:, :, a:b], return_lse=True)
        for a, b in ((0, 4), (4, 4), (4, 9))
    ]
    for order in (parts, parts[::-1]):
        o, merged = fulmen.merge(order)
        np.testing.assert_allclose(o, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(merged, lse, rtol=1e-6)
    swapped = [(o.swapaxes(1, 2), x) for o, x in parts]
    np.testing.assert_array_equal(fulmen.merge(swapped, layout="bshd")[0].swapaxes(1, 2), o)
    half = [(o.astype(BF16), x) for o, x in parts]
    assert fulmen.merge(half)[0].dtype == BF16
    assert fulmen.merge(half, out_dtype="float32")[0].dtype == np.float32
    sinks = np.ones(4, np.float32)
    np.testing.assert_allclose(
        fulmen.merge(parts, sinks=sinks)[0],
        fulmen.attention(Q, K, V, sinks=sinks),
        rtol=1e-5,
        atol=1e-6,
    )


def test_many_threads_at_once() -> None:
    want = [gradients(DO, Q * n, K, V, causal=True) for n in range(1, 5)]
    wrong: list[str] = []

    def work(n: int) -> None:
        for _ in range(50):
            got = gradients(DO, Q * (n + 1), K, V, causal=True)
            if any((x != y).any() for x, y in zip(got, want[n])):
                wrong.append(f"thread {n} got other numbers")
            try:
                fulmen.attention(Q, K, V, softcap=-n - 1)
            except fulmen.ArgumentError as error:
                if f"softcap is {-n - 1};" not in str(error):
                    wrong.append(f"thread {n} got the sentence of another: {error}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rows", "options"), [(2, 1, {}), (8, 2, {"causal": True, "window": (1500, 0)})]
)
def test_few_rows_over_keys_of_several_splits(
    dtype: Any, heads: int, rows: int, options: dict[str, Any]
) -> None:
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, heads, rows, 64)).astype(dtype)
    k, v = (draw.standard_normal((1, 2, 2500, 64)).astype(dtype) for _ in range(2))
    got, want = (
        fulmen.attention(q, k, v, implementation=name, **options) for name in ("tiled", "scalar")
    )
    near = {np.float64: 1e-14, np.float32: 1e-6}.get(dtype, 2e-3)
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), atol=near)
