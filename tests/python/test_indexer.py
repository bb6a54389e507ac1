# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse latent attention: its definition, what it feeds, what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fulmen
from fulmen.errors import ArgumentError, DTypeError, ShapeError

RNG = np.random.default_rng(11)


def integers(*shape: int) -> Any:
    """Small ones: their scores are exact in float32, and many are equal."""
    return RNG.integers(-3, 4, shape)


def chosen(q: Any, k: Any, weights: Any, topk: int) -> Any:
    """Of one row q (head, dim) over k (key, dim): the numbers of its keys, rising."""
    scores = weights.astype(float) @ np.maximum(q.astype(float) @ k.astype(float).T, 0)
    return np.sort(np.argsort(-scores, kind="stable")[:topk])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_definition(dtype: Any, layout: str):
    kind = getattr(ml_dtypes, dtype) if isinstance(dtype, str) else dtype
    q, k = (integers(2, rows, heads, 33).astype(kind) for rows, heads in ((3, 5), (600, 1)))
    weights = integers(2, 3, 5).astype(np.float32)
    lengths = np.array([600, 41])
    given = (q, k, weights)
    if layout == "bhsd":
        given = tuple(x.swapaxes(1, 2) for x in given)
    for topk in (0, 1, 40, 41, 300, 700):
        for causal in (False, True):
            found = fulmen.mla_indexer(
                *given, topk, kv_lengths=lengths, causal=causal, layout=layout
            )
            assert found.dtype == np.int32
            for b, i in np.ndindex(2, 3):
                seen = lengths[b] - 2 + i if causal else lengths[b]
                keys = chosen(q[b, i], k[b, :seen, 0], weights[b, i], topk)
                expected = np.full(topk, -1)
                expected[: len(keys)] = 600 * b + keys
                np.testing.assert_array_equal(found[b, i], expected)


def test_scales_of_keys():
    q, k = integers(1, 2, 4, 16).astype(np.float32), integers(1, 50, 1, 16)
    weights, scale = np.ones((1, 2, 4), np.float32), 2.0 ** RNG.integers(-3, 4, (1, 50, 1, 1))
    k8 = k.astype(ml_dtypes.float8_e4m3fn)
    wide = (k * scale).astype(np.float32)
    expected = fulmen.mla_indexer(q, wide, weights, 7, layout="bshd")
    found = fulmen.mla_indexer(q, k8, weights, 7, k_scale=scale.astype(np.float32), layout="bshd")
    np.testing.assert_array_equal(found, expected)
    same = fulmen.mla_indexer(q, k8, weights, 7, layout="bshd")
    np.testing.assert_array_equal(
        fulmen.mla_indexer(q, k8, weights, 7, k_scale=0.5, layout="bshd"), same
    )


def test_ties_and_nan():
    q, k, weights = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 9, 2)), np.ones((1, 1, 1))
    q, k, weights = (x.astype(np.float32) for x in (q, k, weights))
    assert fulmen.mla_indexer(q, k, weights, 4).tolist() == [[[0, 1, 2, 3]]]
    k[0, 0, 7] = np.nan  # before every number
    k[0, 0, 5] = 1e30
    assert fulmen.mla_indexer(q, k, weights, 1).tolist() == [[[7]]]
    assert fulmen.mla_indexer(q, k, weights, 3).tolist() == [[[0, 5, 7]]]
    assert fulmen.mla_indexer(q, k, -weights, 8).tolist() == [[[0, 1, 2, 3, 4, 6, 7, 8]]]
    hidden = fulmen.mla_indexer(q, k, weights, 6, kv_lengths=np.array([5]))
    assert hidden.tolist() == [[[0, 1, 2, 3, 4, -1]]]


def test_feeds_sparse_attention():
    heads, size = 3, 4
    pool = RNG.standard_normal((6, size, 1, 576)).astype(np.float32)
    keys = RNG.standard_normal((6, size, 1, 32)).astype(np.float32)
    table, lengths = np.array([[4, 1, 0], [2, 5, 3]]), np.array([11, 6])
    q = RNG.standard_normal((2, 2, heads, 576)).astype(np.float32)
    q_index = RNG.standard_normal((2, 2, 8, 32)).astype(np.float32)
    weights = RNG.random((2, 2, 8)).astype(np.float32)
    indices = fulmen.mla_indexer(
        q_index, keys, weights, 5, page_table=table, kv_lengths=lengths, causal=True, layout="bshd"
    )
    o = fulmen.attention_mla(q, pool, indices=indices, scale=0.05, layout="bshd")
    for b, i in np.ndindex(2, 2):
        seen = lengths[b] - 1 + i
        slots = (table[b][:, None] * size + np.arange(size)).reshape(-1)[:seen]
        flat = keys.reshape(-1, 32)[slots]
        mine = slots[chosen(q_index[b, i], flat, weights[b, i], 5)]
        rows = pool.reshape(-1, 576)[mine]
        s = q[b, i] @ rows.T * 0.05
        p = np.exp(s - s.max(axis=1, keepdims=True))
        exact = p @ rows[:, :512] / p.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(o[b, i], exact, rtol=1e-4, atol=1e-5)


def test_refusals():
    q, k = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 1, 8), np.float32)
    weights = np.zeros((2, 3, 4), np.float32)

    def refused(error: Any, match: str, *given: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            fulmen.mla_indexer(*given, layout="bshd", **options)

    refused(ShapeError, r"weights has shape \(2, 3\)", q, k, weights[..., 0], 2)
    refused(DTypeError, "weights is", q, k, 1.0, 2)
    refused(ShapeError, "k has shape", q, np.zeros((2, 5, 2, 8), np.float32), weights, 2)
    refused(ShapeError, "k has shape", q, np.zeros((2, 5, 1, 9), np.float32), weights, 2)
    refused(DTypeError, "q is float64", q.astype(np.float64), k, weights, 2)
    refused(
        DTypeError, "k is float16; allowed is the dtype of q", q, k.astype(np.float16), weights, 2
    )
    refused(DTypeError, "weights is float64", q, k, weights.astype(np.float64), 2)
    refused(ArgumentError, "k_scale is given where k is float32", q, k, weights, 2, k_scale=2.0)
    refused(ArgumentError, "topk is -1", q, k, weights, -1)
    refused(ArgumentError, r"kv_lengths\[1\] is 6; allowed is 0 to 5", q, k, weights, 2,
            kv_lengths=np.array([5, 6]))  # fmt: skip
    refused(ArgumentError, r"page_table\[0, 1\] is 2; k has pages 0 to 1", q, k, weights, 2,
            page_table=np.array([[0, 2], [1, 0]]), kv_lengths=np.array([6, 6]))  # fmt: skip
    refused(DTypeError, "kv_lengths is float64", q, k, weights, 2, kv_lengths=np.array([5.0, 5.0]))
