# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention: each query row sees the slots of its list, whatever the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(23)
BATCH, ROWS, HEADS, DIM, DIM_V, TOPK = 2, 3, 4, 72, 64, 9
Q = RNG.standard_normal((BATCH, ROWS, HEADS, DIM)).astype(np.float32)
SCALE = 48**-0.5


def pool_of(pages: int, rows: int) -> Any:
    return RNG.standard_normal((pages, rows, 1, DIM)).astype(np.float32)


def drawn(num_slots: int, topk: int = TOPK) -> Any:
    """Slots in any order, some twice, some of none."""
    indices = RNG.integers(0, num_slots, (BATCH, ROWS, topk)).astype(np.int32)
    indices[RNG.random(indices.shape) < 0.3] = -1
    indices[0, 1] = -1
    return indices


def expected(pools: list[Any], lists: list[Any], sinks: Any = None) -> tuple[Any, Any]:
    o = np.zeros((BATCH, ROWS, HEADS, DIM_V))
    lse = np.full((BATCH, HEADS, ROWS), -np.inf)
    for b, i in np.ndindex(BATCH, ROWS):
        keys = np.concatenate(
            [
                pool.reshape(-1, DIM)[chosen[b, i][chosen[b, i] >= 0]]
                for pool, chosen in zip(pools, lists)
            ]
        ).astype(np.float64)
        for h in range(HEADS if len(keys) else 0):
            s = keys @ Q[b, i, h].astype(np.float64) * SCALE
            lse[b, h, i] = np.log(np.exp(s).sum())
            total = np.exp(lse[b, h, i]) + (0 if sinks is None else np.exp(float(sinks[h])))
            o[b, i, h] = np.exp(s) @ keys[:, :DIM_V] / total
    return o, lse


def check(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ["tiled", "scalar"])
@pytest.mark.parametrize("page_rows", [1, 5, 64])
def test_against_float64(page_rows: int, implementation: str):
    pool = pool_of(13, page_rows)
    indices = drawn(13 * page_rows)
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    options = {"dim_v": DIM_V, "scale": SCALE, "return_lse": True, "implementation": implementation}
    for given in ({}, {"sinks": sinks}):
        found = fulmen.attention_mla(Q, pool, indices=indices, layout="bshd", **given, **options)
        check(found, expected([pool], [indices], given.get("sinks")))
    by_head = fulmen.attention_mla(
        Q.swapaxes(1, 2), pool.swapaxes(1, 2), indices=indices.astype(np.int64), **options
    )
    o, lse = expected([pool], [indices])
    check(by_head, (o.swapaxes(1, 2), lse))
    packed = fulmen.attention_mla(
        Q.reshape(-1, HEADS, DIM), pool, indices=indices.reshape(-1, TOPK), layout="shd", **options
    )
    check(packed, (o.reshape(-1, HEADS, DIM_V), lse.swapaxes(0, 1).reshape(HEADS, -1)))


def test_pages_that_lie_apart():
    whole = np.full((7, 9, 1, DIM + 8), np.nan, np.float32)
    pool = whole[:, 1:6, :, 4 : 4 + DIM]
    pool[:] = pool_of(7, 5)
    indices = drawn(35)
    found = fulmen.attention_mla(
        Q, pool, indices=indices, dim_v=DIM_V, scale=SCALE, layout="bshd", return_lse=True
    )
    check(found, expected([np.ascontiguousarray(pool)], [indices]))


def test_what_is_not_chosen_may_be_nan():
    pool = pool_of(6, 4)
    indices = drawn(24)
    lengths = np.array([4, 7], np.int32)
    counted = np.where(np.arange(TOPK) < lengths[:, None, None], indices, -1)
    never = np.setdiff1d(np.arange(24), counted)
    pool.reshape(-1, DIM)[never] = np.nan
    wanted = expected([pool], [counted])
    indices[np.arange(TOPK) >= np.broadcast_to(lengths[:, None, None], indices.shape)] = 10**6
    for topk_lengths in (lengths, np.repeat(lengths[:, None], ROWS, 1)):
        found = fulmen.attention_mla(
            Q, pool, indices=indices, topk_lengths=topk_lengths, dim_v=DIM_V, scale=SCALE,
            layout="bshd", return_lse=True,
        )  # fmt: skip
        check(found, wanted)


def test_two_caches():
    pools = [pool_of(6, 4), pool_of(3, 16)]
    lists = [drawn(24), drawn(48, 5)]
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    for given in ({}, {"sinks": sinks}):
        found = fulmen.attention_mla(
            Q, pools[0], indices=lists[0], extra_kv=pools[1], extra_indices=lists[1], dim_v=DIM_V,
            scale=SCALE, layout="bshd", return_lse=True, **given,
        )  # fmt: skip
        check(found, expected(pools, lists, given.get("sinks")))
    halves = [x.astype(np.float16) for x in (Q, *pools)]
    o = fulmen.attention_mla(
        halves[0], halves[1], indices=lists[0], extra_kv=halves[2], extra_indices=lists[1],
        dim_v=DIM_V, scale=SCALE, layout="bshd",
    )  # fmt: skip
    assert o.dtype == np.float16
    np.testing.assert_allclose(o, expected(pools, lists)[0], rtol=0.01, atol=0.01)


def test_slots_of_a_table():
    """The option beneath it, with heads of keys and values apart."""
    k, v = (RNG.standard_normal((5, 2, 6, d)).astype(np.float32) for d in (16, 8))
    q = RNG.standard_normal((3, 4, 1, 16)).astype(np.float32)
    table = np.array([[29, -1, 3, 3], [0, 7, -1, -1], [-1, -1, 11, 10]])
    lengths = np.array([4, 3, 2])
    found, lse = fulmen.attention_paged(q, k, v, table, lengths, slots=True, return_lse=True)
    for b, n in enumerate(lengths):
        slots = table[b, :n][table[b, :n] >= 0]
        if not len(slots):
            assert (found[b] == 0).all()
            assert (lse[b] == -np.inf).all()
            continue
        rows = [x[slots // 6, :, slots % 6].swapaxes(0, 1)[None] for x in (k, v)]
        wanted = fulmen.attention(q[b : b + 1], *rows)
        np.testing.assert_allclose(found[b : b + 1], wanted, rtol=1e-5, atol=1e-6)


def refused(sentence: str, error: type[Exception] = ArgumentError, **changes: Any) -> None:
    given: dict[str, Any] = {
        "kv": pool_of(2, 4), "indices": np.zeros((BATCH, ROWS, TOPK), np.int32), "dim_v": DIM_V,
        "layout": "bshd",
    }  # fmt: skip
    with pytest.raises(error, match=sentence):
        fulmen.attention_mla(Q, **{**given, **changes})


def test_refusals():
    table = np.zeros((2, 1), np.int32)
    refused("page_table is given beside indices", page_table=table)
    refused("out is given beside indices", out=np.zeros((BATCH, ROWS, HEADS, DIM_V), np.float32))
    refused("causal is given beside indices", causal=True)
    refused("bias is given beside indices", bias=np.zeros((1, TOPK), np.float32))
    refused("topk_lengths is given beside no indices", indices=None, topk_lengths=table)
    refused("extra_kv is given beside no indices", indices=None, extra_kv=table)
    refused("extra_indices is None", extra_kv=pool_of(2, 4))
    refused("extra_kv is None", extra_indices=table)
    refused("extra_topk_lengths is given without", extra_topk_lengths=table)
    refused(r"indices has shape \(2, 1\)", ShapeError, indices=table)
    refused("indices has topk = 0", ShapeError, indices=np.zeros((BATCH, ROWS, 0), np.int32))
    refused(r"topk_lengths has shape \(7,\)", ShapeError, topk_lengths=np.zeros(7, np.int32))
    refused("q has 4 axes", ShapeError, layout="shd")
    bad = np.zeros((BATCH, ROWS, TOPK), np.int32)
    bad[1, 1, 3] = 8
    refused(r"page_table\[4, 3\] is 8, but k and v have 8 slots", indices=bad)
    bad[1, 1, 3] = -2
    refused("allowed is 0 to 7, and -1 for a key that is hidden", indices=bad)
    with pytest.raises(ArgumentError, match="page_table is missing; with slots = 1"):
        fulmen.attention(Q, Q, Q, slots=True)


def test_form():
    assert fulmen.mla_form(1, 8192, 16).form == "absorbed"
    assert fulmen.mla_form(8192, 8192, 128).form == "expanded"
    found = fulmen.mla_form(1, 1, 1, latent=2, rope=1, nope=1, dim_v=1, causal=False)
    assert found.absorbed_flops == 2 * 1 * 2 * 2 + 2 * 5
    assert found.expanded_flops == 2 * 1 * 2 * 2 + 2 * 3
    rows = [q for q in range(1, 4097) if fulmen.mla_form(q, 8192, 128).form == "absorbed"]
    assert rows == list(range(1, len(rows) + 1))  # one crossing
    with pytest.raises(ArgumentError, match="heads is -1"):
        fulmen.mla_form(1, 1, -1)
    with pytest.raises(ArgumentError, match="q_rows is 2 and kv_rows 1"):
        fulmen.mla_form(2, 1, 1)
