# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.attention_mla: the values are the first numbers of the keys, whichever way they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(11)
Q = RNG.standard_normal((2, 3, 4, 72)).astype(np.float32)
KV = RNG.standard_normal((2, 1, 20, 72)).astype(np.float32)
SCALE = 48**-0.5


def expected(**options: Any) -> Any:
    return fulmen.attention(Q, KV, np.array(KV[..., :64]), scale=SCALE, **options)


def test_values_are_the_first_numbers_of_the_keys():
    for options in ({}, {"causal": True}, {"kv_lengths": np.array([20, 7])}):
        found = fulmen.attention_mla(Q, KV, dim_v=64, scale=SCALE, **options)
        assert found.shape == (2, 3, 4, 64)
        np.testing.assert_array_equal(found, expected(**options))


def test_pages():
    pool = np.full((12, 1, 5, 72), np.nan, np.float32)
    table = np.array([[3, 0, 11, 7], [2, 9, 4, 10]])
    pool[table.reshape(-1)] = KV.reshape(8, 5, 72)[:, None]
    lengths = np.array([20, 13])
    found, lse = fulmen.attention_mla(
        Q, pool, table, lengths, dim_v=64, scale=SCALE, causal=True, return_lse=True
    )
    o, expected_lse = expected(kv_lengths=lengths, causal=True, return_lse=True)
    np.testing.assert_allclose(found, o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    packed = np.concatenate([Q[0], Q[1]], axis=1)
    o = fulmen.attention_mla(
        packed, pool, table, lengths, dim_v=64, scale=SCALE, causal=True, cu_q=[0, 4, 8],
        layout="hsd",
    )  # fmt: skip
    np.testing.assert_allclose(
        np.concatenate([found[0], found[1]], axis=1), o, rtol=1e-5, atol=1e-5
    )


def test_batch_index_and_left_padding():
    entries = np.array([1, 0])
    found = fulmen.attention_mla(
        Q, KV, None, np.array([20, 20]), dim_v=64, scale=SCALE, batch_index=entries
    )
    turned = fulmen.attention_mla(Q, KV[::-1].copy(), dim_v=64, scale=SCALE)
    np.testing.assert_allclose(found, turned, rtol=1e-5, atol=1e-5)
    starts = np.array([6, 0])
    found = fulmen.attention_mla(
        Q, KV, None, np.array([20, 20]), dim_v=64, scale=SCALE, kv_start=starts
    )
    alone = fulmen.attention_mla(Q[:1], KV[:1, :, 6:], dim_v=64, scale=SCALE)
    np.testing.assert_allclose(found[:1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim_v", [0, 73, -1])
def test_dim_v_is_of_the_keys(dim_v: int):
    with pytest.raises(ShapeError, match=f"dim_v is {dim_v}; rows of kv have 72 numbers"):
        fulmen.attention_mla(Q, KV, dim_v=dim_v)


def test_refusals():
    with pytest.raises(ArgumentError, match="cu_q is given without page_table"):
        fulmen.attention_mla(Q[0], KV, cu_q=[0, 4], dim_v=64)
    with pytest.raises(ArgumentError, match="kv_lengths is None"):
        fulmen.attention_mla(Q, KV, np.array([[0], [1]]), dim_v=64)
