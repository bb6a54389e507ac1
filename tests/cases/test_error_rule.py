# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The error rule must let good results pass and must fail wrong ones, however small the mistake.

Each mutation below is a bug that some library has had: the rule has to see it in a case of ordinary
size, in float32 and in bfloat16, when everything else is exact to the last bit.
"""

from dataclasses import replace

import numpy as np
import pytest

from fulmen.lab.cases import Case, find
from fulmen.lab.cases.arithmetic import plain
from fulmen.lab.cases.arrays import dtype_of, ulp
from fulmen.lab.cases.error_rule import NAMES, Fair, allowance, consult, judge, judge_rows
from fulmen.lab.cases.oracle import Accumulator, attend, output
from fulmen.lab.cases.problem import build_problem
from fulmen.lab.cases.visible import segments

CASE = Case("mutations", heads=4, kv_heads=2, batch=2, q_rows=33, kv_rows=40, bias="11qk",
            sinks="normal", causal=True, dlse=True)  # fmt: skip


def returned(oracle, name, dtype):
    """A result as the best implementation would return it: the reference, rounded once."""
    kind = "float32" if name in ("lse", "dsinks") else dtype
    return getattr(oracle.reference, name).astype(dtype_of(kind))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def judged(request):
    case = replace(CASE, name=f"mutations_{request.param}", dtype=request.param)
    return consult(build_problem(case), case.dtype), case.dtype


@pytest.mark.parametrize("name", NAMES)
def test_the_rounded_reference_and_the_plain_computation_pass(judged, name):
    oracle, dtype = judged
    got = returned(oracle, name, dtype)
    assert judge(name, got, oracle).ratio < 0.6
    assert judge(name, getattr(oracle.plain, name).astype(got.dtype), oracle).passed


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_number_fails(judged, name):
    """One number of one row is off by 2% of the largest of the row; more where a row is a sum."""
    oracle, dtype = judged
    got = returned(oracle, name, dtype)
    at = tuple(n // 2 for n in got.shape)
    row = got[at[:-1]] if name != "lse" else got[at]
    share = {"dsinks": 0.1, "dbias": 0.05}.get(name, 0.02)
    got[at] += (share * np.abs(np.asarray(row, np.float32)).max()).astype(got.dtype)
    verdict = judge(name, got, oracle)
    assert not verdict.passed
    assert verdict.ratio > 1
    assert "allowed in row" in verdict.message


MUTATIONS = {
    "base 2 lse": ("lse", lambda x, o: x / np.log(2)),
    "lse with the sink": ("lse", lambda x, o: x + 0.05),
    "a row of zeros": ("o", lambda x, o: np.where(np.arange(33)[:, None] == 32, 0, x)),
    "two rows swapped": ("o", lambda x, o: x[:, :, [1, 0, *range(2, 33)]]),
    "heads in another order": ("dk", lambda x, o: x[:, ::-1]),
    "scale forgotten": ("dq", lambda x, o: x * 4),
    "one key too many": ("o", lambda x, o: x * (1 - 1 / 40)),
    "sign of dsinks": ("dsinks", lambda x, o: -x),
    "half of a group": ("dv", lambda x, o: x / 2),
    "a transposed bias gradient": ("dbias", lambda x, o: x[..., ::-1]),
    "one ulp of bfloat16 everywhere": ("lse", lambda x, o: x * (1 + 2**-7)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_fail(judged, mutation):
    oracle, dtype = judged
    name, mutate = MUTATIONS[mutation]
    got = returned(oracle, name, dtype)
    wrong = mutate(got.astype(np.float64), oracle).astype(got.dtype)
    assert not judge(name, wrong, oracle).passed


def test_tf32_is_not_float32():
    """q and k with 11 bits, as tensor cores would read them: float32 means float32."""
    case = replace(CASE, name="tf32", bias="", sinks="", dim=64)
    problem = build_problem(case)
    oracle = consult(problem, "float32")
    cut = lambda x: (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # noqa: E731
    cheap = consult(replace(problem, q=cut(problem.q), k=cut(problem.k)), "float32")
    for name in ("o", "lse", "dq", "dk", "dv"):
        got = getattr(cheap.reference, name).astype(np.float32)
        assert not judge(name, got, oracle).passed, name


@pytest.mark.parametrize("name", ["grid1_37", "grid5_34"])
@pytest.mark.parametrize("factor", [1.09, 1.37, 1.61, 1.93])
def test_another_row_maximum_passes(name, factor):
    """exp(s - m) rounds to other 16-bit numbers with another m, and no m is better than another.

    In these cases every second m fails in some row when the luck of the plain computation is all
    that counts: one key beside an outlier channel, and probabilities below the normal numbers.
    """
    case = find(name)[0]
    problem, fair = build_problem(case), plain(case.dtype)
    results = Accumulator(problem, fair)
    for at in segments(problem):
        head = attend(problem, at, fair)
        head.e, head.l_total = head.e * np.float32(factor), head.l_total * np.float32(factor)
        results.add(at, output(head, fair.cast(problem.v[at.kv_at]), fair), None)
    kind = dtype_of(case.dtype)
    verdict = judge("o", results.o.astype(kind), consult(problem, case.dtype))
    assert verdict.passed, verdict.message


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_patterns(judged, wrong):
    oracle, dtype = judged
    got = returned(oracle, "o", dtype)
    got[1, 2, 3, 4] = wrong
    verdict = judge("o", got, oracle)
    assert not verdict.passed
    assert verdict.where == (1, 2, 3)
    assert "differs in 1 entries" in verdict.message


def test_a_missing_nan_fails_and_a_right_one_passes():
    case = Case("nan_pattern", poison="nan_k", causal=True, q_rows=12)
    oracle = consult(build_problem(case), "float32")
    got = oracle.reference.o.astype(np.float32)
    assert np.isnan(got).any()
    assert judge("o", got, oracle).passed
    assert not judge("o", np.nan_to_num(got), oracle).passed


def test_shapes_differ(judged):
    oracle, _ = judged
    verdict = judge("o", oracle.reference.o[:1].astype(np.float32), oracle)
    assert not verdict.passed
    assert "shape" in verdict.message


def fair(plain_errors, terms=0.0, inherited=0.0, walk=0.0, head_axes=0):
    """Rows of two numbers around 1, whose plain error is given."""
    error = np.array(plain_errors, np.float64)
    truth = np.ones((*error.shape, 2))
    plain = truth + np.stack([error, np.zeros_like(error)], axis=-1)
    return Fair(
        truth,
        plain,
        np.full_like(truth, terms),
        np.full_like(truth, inherited),
        np.full_like(truth, walk),
        2.0**-23,
        head_axes,
    )


def test_the_allowance_to_the_bit():
    """2 max(plain, median, walk) + 8 eps A + inherited + ulp(1), in float32 and in bfloat16."""
    f32, bf16 = np.dtype(np.float32), dtype_of("bfloat16")
    rows = fair([0.5, 0.25, 0.0, 0.125, 0.0])
    assert (allowance(rows, f32) == np.array([1, 0.5, 0.25, 0.25, 0.25]) + 2.0**-23).all()
    assert (allowance(fair([0.0]), bf16) == 2.0**-7).all()
    assert (allowance(fair([0.0], terms=3.0), f32) == (8 * 3 + 1) * 2.0**-23).all()
    assert (allowance(fair([0.0], inherited=3.0), f32) == 3 + 2.0**-23).all()
    assert (allowance(fair([0.25, 0.25], walk=1.5), f32) == 3 + 2.0**-23).all()
    assert (allowance(fair([0.25, 0.25], walk=0.125), f32) == 0.5 + 2.0**-23).all()


def test_one_key_excuses_no_gradient():
    """Its o is its v to the bit, so delta is exact: dq is 0 within float32, far below 2^-8."""
    case = Case("one_key_rule", kv_rows=1, q_rows=9, dtype="bfloat16", inputs="wide")
    oracle = consult(build_problem(case), "bfloat16")
    assert oracle.inherited.dq.max() < 1e-3
    wrong = np.full((1, 2, 9, 16), 1e-2, dtype_of("bfloat16"))
    assert not judge("dq", wrong, oracle).passed


def test_the_median_is_that_of_the_head():
    rows = fair([[0.5, 0.5, 0.5], [0.0, 0.0, 0.5]], head_axes=1)
    allowed = allowance(rows, np.dtype(np.float32)) - 2.0**-23
    assert (allowed == [[1, 1, 1], [0, 0, 1]]).all()


def test_a_plain_computation_that_breaks_excuses_nothing():
    rows = fair([0.0, 0.0])
    rows.plain[0, 0] = np.nan
    rows.plain[1, 0] = np.inf
    got = np.array([[1.5, 1.0], [1.0, 1.0]], np.float32)
    verdict = judge_rows(got, rows)
    assert not verdict.passed
    assert verdict.where == (0,)


def test_the_boundary():
    rows = fair([0.25])
    limit = np.float32(1.5 + 2.0**-23)
    assert judge_rows(np.array([[limit, 1]], np.float32), rows).passed
    over = np.nextafter(limit, np.float32(2))
    assert not judge_rows(np.array([[over, 1]], np.float32), rows).passed


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_ulp_is_the_spacing(dtype):
    kind = dtype_of(dtype)
    x = np.array([1.0, 1.5, 2.0, 3.0, 1e-3, 6e4, 0.0, 1e-300], np.float64).astype(kind)
    assert (ulp(x.astype(np.float64), kind) == np.spacing(x).astype(np.float64)).all()


def test_ulp_of_bfloat16_and_of_what_is_not_finite():
    bf16 = dtype_of("bfloat16")
    assert ulp(np.array([1.0, 2.0, 0.99]), bf16).tolist() == [2**-7, 2**-6, 2**-8]
    assert ulp(np.array([0.0]), bf16)[0] == 2.0**-133
    assert np.isnan(ulp(np.array([np.inf, np.nan]), bf16)).all()
