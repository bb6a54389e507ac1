# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The oracle against numbers worked out by hand and against the laws of attention.

Scores of 0 and ln 3 make probabilities of 1/4 and 3/4: everything below can be checked on paper.
"""

import math

import numpy as np
import pytest

from fulmen.lab.cases.arithmetic import plain, reference
from fulmen.lab.cases.oracle import evaluate
from fulmen.lab.cases.visible import Options, Problem
from fulmen.masks import Documents

INF, NAN = np.inf, np.nan
L3 = math.log(3)
F64 = reference("float32")


def tensors(seed=0, heads=1, kv_heads=1, q_rows=3, kv_rows=4, dim=2, dim_v=3):
    """Random q, k, v, do, dlse of one batch entry."""
    rng = np.random.default_rng(seed)
    shapes = [
        (1, heads, q_rows, dim),
        (1, kv_heads, kv_rows, dim),
        (1, kv_heads, kv_rows, dim_v),
        (1, heads, q_rows, dim_v),
        (1, heads, q_rows),
    ]
    return [rng.standard_normal(shape) for shape in shapes]


def run(q, k, v, do=None, dlse=None, **options):
    return evaluate(Problem(q, k, v, Options(**options), do, dlse), F64)


def by_hand(**options):
    """Two queries, two keys: scores 0, ln 3 and ln 3, 0; v = 8, 4; do = 1, 2; dlse = 4, 0."""
    q = np.eye(2)[None, None]
    k = np.array([[0.0, 1.0], [1.0, 0.0]])[None, None] * L3
    v = np.array([[8.0], [4.0]])[None, None]
    do = np.array([[1.0], [2.0]])[None, None]
    dlse = np.array([[[4.0, 0.0]]])
    return run(q, k, v, do, dlse, scale=1.0, **options)


def test_two_by_two():
    """p = [1/4 3/4; 3/4 1/4], o = 5, 7; lse = ln 4.

    dp = do v: [8 4; 16 8], delta = do o - dlse: 5 - 4 = 1, 14.
    ds = p (dp - delta): [1/4 * 7, 3/4 * 3; 3/4 * 2, 1/4 * -6] = [7/4 9/4; 3/2 -3/2].
    dq = ds k: row 0: ln 3 * [9/4, 7/4]; row 1: ln 3 * [-3/2, 3/2].
    dk = ds^T q: row 0: [7/4, 3/2]; row 1: [9/4, -3/2].
    dv = p^T do: 1/4 + 3/2 = 7/4; 3/4 + 1/2 = 5/4.
    """
    got = by_hand()
    close = {"rtol": 1e-15, "atol": 1e-15}
    np.testing.assert_allclose(got.o[0, 0], [[5], [7]], **close)
    np.testing.assert_allclose(got.lse[0, 0], [math.log(4)] * 2, **close)
    np.testing.assert_allclose(got.dq[0, 0] / L3, [[9 / 4, 7 / 4], [-3 / 2, 3 / 2]], rtol=1e-14)
    np.testing.assert_allclose(got.dk[0, 0], [[7 / 4, 3 / 2], [9 / 4, -3 / 2]], rtol=1e-14)
    np.testing.assert_allclose(got.dv[0, 0], [[7 / 4], [5 / 4]], **close)


def test_two_by_two_with_a_sink():
    """A sink of ln 4 doubles each denominator: o = 5/2, 7/2; lse stays ln 4; p_sink = 1/2.

    delta without dlse = do o = 5/2, 7; dsink = -(1/2 * 5/2 + 1/2 * 7) = -19/4.
    ds row 0 = [1/8 * (8 - 5/2), 3/8 * (4 - 5/2)] + 4 * [1/4, 3/4] = [27/16, 57/16].
    """
    got = by_hand(sinks=np.array([math.log(4)]))
    np.testing.assert_allclose(got.o[0, 0], [[5 / 2], [7 / 2]], rtol=1e-15)
    np.testing.assert_allclose(got.lse[0, 0], [math.log(4)] * 2, rtol=1e-15)
    np.testing.assert_allclose(got.dsinks, [-19 / 4], rtol=1e-15)
    np.testing.assert_allclose(got.dq[0, 0, 0] / L3, [57 / 16, 27 / 16], rtol=1e-14)
    np.testing.assert_allclose(got.dv[0, 0], [[7 / 8], [5 / 8]], rtol=1e-15)


def test_two_by_two_causal_with_bias():
    """Query 0 sees key 0 alone; a bias of -ln 3 makes row 1 uniform: o = 8, 6, lse = 0, ln 2.

    Row 1: ds = 1/2 * ([16 8] - 12) = [2, -2]; row 0: ds = dlse = 4 on its key.
    """
    got = by_hand(causal=True, bias=np.array([[0.0, 9.0], [-L3, 0.0]]))
    np.testing.assert_allclose(got.o[0, 0], [[8], [6]], rtol=1e-15)
    np.testing.assert_allclose(got.lse[0, 0], [0, math.log(2)], atol=1e-15)
    np.testing.assert_allclose(got.dbias, [[4, 0], [2, -2]], atol=1e-14)


def test_softcap_comes_before_the_bias_and_its_slope_stays_out_of_dbias():
    """Scores 2 tanh(x / 2) + bias: dbias is the slope by the sum, dq and dk have 1 - tanh^2 too."""
    q, k, v, do, _ = tensors(q_rows=1, kv_rows=2, dim=1, dim_v=1)
    q[...], k[0, 0, :, 0], v[0, 0, :, 0], do[...] = 1.0, [0.0, 2 * math.atanh(0.5)], [8, 4], 1
    bias = np.array([[1.0, L3]])  # s = 2 t = 0 and 1, plus the bias: 1 and 1 + ln 3
    got = run(q, k, v, do, scale=1.0, softcap=2.0, bias=bias)
    np.testing.assert_allclose(got.o, [[[[5.0]]]], rtol=1e-15)
    np.testing.assert_allclose(got.dbias, [[3 / 4, -3 / 4]], rtol=1e-14)
    np.testing.assert_allclose(got.dk[0, 0, :, 0], [3 / 4, -9 / 16], rtol=1e-14)  # 1 - t^2: 1, 3/4


def test_alibi_by_hand():
    """Slope ln 3, one query that stands at key 1: scores -ln 3, 0, -ln 3 of distances 1, 0, 1."""
    q, k, v, _, _ = tensors(q_rows=2, kv_rows=3, dim=1, dim_v=1)
    v[0, 0, :, 0] = [5, 10, 20]
    got = run(q, 0 * k, v, alibi_slopes=np.array([L3]))
    np.testing.assert_allclose(got.o[0, 0, 0], [(5 + 30 + 20) / 5], rtol=1e-15)
    got = run(q, 0 * k, v, alibi_slopes=np.array([[L3]]), alignment="top_left")
    np.testing.assert_allclose(got.o[0, 0, 1], [(5 + 30 + 20) / 5], rtol=1e-15)


def test_heads_share_keys_in_order():
    """Heads 0, 1, 2 use kv_head 0 and heads 3, 4, 5 kv_head 1; dk is the sum over the three."""
    q, k, v, do, dlse = tensors(heads=6, kv_heads=2)
    got = run(q, k, v, do, dlse)
    for g in range(2):
        alone = [
            run(
                q[:, h : h + 1],
                k[:, g : g + 1],
                v[:, g : g + 1],
                do[:, h : h + 1],
                dlse[:, h : h + 1],
            )
            for h in range(3 * g, 3 * g + 3)
        ]
        for n, one in enumerate(alone):
            np.testing.assert_array_equal(got.o[:, 3 * g + n], one.o[:, 0])
        np.testing.assert_allclose(got.dk[:, g], sum(one.dk for one in alone)[:, 0], rtol=1e-14)


def test_packed_sequences_are_their_parts():
    q, k, v, do, dlse = (x[0] for x in tensors(heads=2, kv_heads=1, q_rows=7, kv_rows=9))
    cu_q, cu_kv = np.array([0, 3, 3, 6]), np.array([0, 4, 6, 6], np.int64)
    got = run(q, k, v, do, dlse, causal=True, cu_q=cu_q, cu_kv=cu_kv)
    part = run(
        *(x[None, :, :n] for x, n in ((q, 3), (k, 4), (v, 4), (do, 3), (dlse, 3))), causal=True
    )
    np.testing.assert_allclose(got.o[:, :3], part.o[0], rtol=1e-15)
    np.testing.assert_allclose(got.dk[:, :4], part.dk[0], rtol=1e-14, atol=1e-16)
    assert (got.o[:, 3:] == 0).all()
    assert (got.lse[:, 3:] == -INF).all()
    assert (got.dk[:, 4:] == 0).all()
    assert (got.dq[:, 3:] == 0).all()


def test_a_row_that_sees_nothing_is_harmless():
    """Row 1 sees nothing and all that is its own is NaN: the rest is as without it."""
    q, k, v, do, dlse = tensors()
    options = {"bias": np.zeros((3, 4)), "sinks": np.zeros(1)}
    rest = run(*(x[:, :, ::2] for x in (q,)), k, v, do[:, :, ::2], dlse[:, :, ::2],
               bias=np.zeros((2, 4)), sinks=np.zeros(1))  # fmt: skip
    q[:, :, 1], do[:, :, 1], dlse[:, :, 1] = NAN, NAN, NAN
    got = run(q, k, v, do, dlse, masks=(np.arange(3)[:, None] != 1,), **options)
    assert (got.o[:, :, 1] == 0).all()
    assert (got.lse[:, :, 1] == -INF).all()
    assert (got.dq[:, :, 1] == 0).all()
    assert (got.dbias[1] == 0).all()
    for name in ("dk", "dv", "dsinks"):
        np.testing.assert_allclose(getattr(got, name), getattr(rest, name), atol=1e-15)


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("arithmetic", [F64, plain("float32")], ids=["reference", "plain"])
def test_hidden_keys_never_matter(junk, arithmetic):
    q, k, v, do, dlse = tensors()
    want = evaluate(
        Problem(q, k[:, :, :2], v[:, :, :2], Options(softcap=3.0), do, dlse), arithmetic
    )
    k[:, :, 2:], v[:, :, 2:] = junk, junk
    options = Options(kv_lengths=np.array([2]), softcap=3.0)
    got = evaluate(Problem(q, k, v, options, do, dlse), arithmetic)
    for name in ("o", "lse", "dq"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name)[:, :, :2], getattr(want, name))
        assert (getattr(got, name)[:, :, 2:] == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_visible_nan_reaches_the_rows_that_see_it_and_no_other(name):
    q, k, v, do, _ = tensors(kv_rows=3)
    bias = np.zeros((3, 3))
    {"q": q[0, 0, 1], "k": k[0, 0, 1], "v": v[0, 0, 1], "bias": bias[1, 1:2]}[name][:] = NAN
    got = run(q, k, v, do, causal=True, bias=bias)
    seen = {"q": [1], "k": [1, 2], "v": [1, 2], "bias": [1]}[name]
    for i in range(3):
        assert (np.isnan(got.o[0, 0, i]) == (i in seen)).all()
        assert np.isnan(got.lse[0, 0, i]) == (i in seen and name != "v")  # lse knows no v
        assert (np.isnan(got.dq[0, 0, i]) == (i in seen)).all()
    keys = [j for j in range(3) if any(j <= i for i in seen)]
    for j in range(3):
        assert (np.isnan(got.dk[0, 0, j]) == (j in keys)).all()
        assert (np.isnan(got.dv[0, 0, j]) == (j in keys and name != "v")).all()


def test_a_bias_of_plus_infinity_is_nan_and_of_the_lowest_float_is_uniform():
    q, k, v, _, _ = tensors()
    bias = np.zeros((3, 4))
    bias[0, 2] = INF
    bias[1] = np.finfo(np.float32).min
    got = run(q, k, v, bias=bias)
    assert np.isnan(got.o[0, 0, 0]).all()
    np.testing.assert_allclose(got.o[0, 0, 1], v[0, 0].mean(0), rtol=1e-15)
    assert np.isfinite(got.o[0, 0, 2]).all()


@pytest.mark.parametrize("size", [1e6, 1e8, -1e6])
def test_huge_scores(size):
    q, k, v, do, _ = tensors(dim=1)
    k[:] = 1 + 1e-6 * k / size
    q[:] = size
    got = run(q, k, v, do, scale=1.0)
    np.testing.assert_allclose(got.o - v.mean(2, keepdims=True), 0, atol=1e-4)
    np.testing.assert_allclose(got.lse, size + math.log(4), rtol=1e-9)


@pytest.mark.parametrize(("sink", "share"), [(-INF, 0.0), (-1e4, 0.0), (1e4, 1.0)])
def test_extreme_sinks(sink, share):
    q, k, v, do, _ = tensors()
    without = run(q, k, v)
    got = run(q, k, v, do, sinks=np.array([sink]))
    np.testing.assert_allclose(got.o, without.o * (1 - share), atol=1e-15)
    np.testing.assert_array_equal(got.lse, without.lse)
    assert (got.dsinks == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_plain_rounds_where_the_rule_says(dtype):
    """One key: the plain o is v to the bit; two equal keys: e = 1, so r(e) changes nothing."""
    q, k, v, _, _ = tensors(q_rows=2, kv_rows=1)
    arithmetic = plain(dtype)
    rounded = [arithmetic.round(arithmetic.cast(x)) for x in (q, k, v)]
    got = evaluate(Problem(*rounded, Options()), arithmetic)
    np.testing.assert_array_equal(got.o, np.broadcast_to(rounded[2], got.o.shape))
    assert got.o.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_plain_sums_in_natural_order():
    """2^24 + 1 + 1 in float32: from the left each 1 is lost, from the right none."""
    ones = np.array([[2.0**24, 1.0, 1.0]], np.float32)
    arithmetic = plain("float32")
    assert arithmetic.sum_rows(ones)[0] == 2**24
    assert arithmetic.sum_rows(ones[:, ::-1])[0] == 2**24 + 2
    assert arithmetic.dot(ones, np.ones((3, 1), np.float32))[0, 0] == 2**24
    assert arithmetic.sum_to(ones[None, None], (1, 1))[0, 0] == 2**24


def test_plain_rounds_the_unnormalised_probabilities():
    """bfloat16 has 8 bits: e = exp(-1/512) rounds to 1 or 1 - 2^-8, and o shows which."""
    arithmetic = plain("bfloat16")
    q, k = np.ones((1, 1, 1, 1)), np.array([0.0, -1 / 512]).reshape(1, 1, 2, 1)
    v = np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    got = evaluate(Problem(q, k, v, Options(scale=1.0)), arithmetic).o[0, 0, 0, 0]
    e = np.float32(math.exp(-1 / 512))
    rounded = arithmetic.round(e)
    assert rounded != e
    assert got == arithmetic.round(np.float32(rounded / (1 + e)))


def test_documents_on_empty_sequences():
    q, k, v, do, _ = tensors(q_rows=0)
    got = run(q, k, v, do, masks=(Documents(np.zeros(0, int), np.zeros(4, int)),))
    assert got.o.shape == (1, 1, 0, 3)
    assert (got.dk == 0).all()
