# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Inputs and views: what a kind promises is there, poison lies where it should and nowhere else."""

import numpy as np
import pytest

from fulmen.lab.cases import Case
from fulmen.lab.cases.checks import root
from fulmen.lab.cases.inputs import KINDS
from fulmen.lab.cases.problem import build_call, build_problem
from fulmen.lab.cases.views import VIEWS
from fulmen.lab.cases.visible import visible


def scores(problem):
    q, k = (np.asarray(x, np.float64) for x in (problem.q, problem.k))
    return q @ k.swapaxes(-1, -2) * problem.options.scale_for(q.shape[-1])


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("shift_minus_1e5", -1.001e5, -0.999e5),
        ("shift_plus_1e5", 0.999e5, 1.001e5),
        ("shift_minus_1e4", -1.01e4, -0.99e4),
        ("opposed_100", -130, -75),
        ("opposed_2e5", -2.6e5, -1.5e5),
        ("constant_1000", 4e6, 4e6),
        ("zeros", 0, 0),
        ("tiny", -1e-10, 1e-10),
    ],
)
def test_scores_are_where_the_kind_says(kind, low, high):
    s = scores(build_problem(Case(f"kind_{kind}", inputs=kind, q_rows=20)))
    assert low <= s.min()
    assert s.max() <= high


@pytest.mark.parametrize(("kind", "size"), [("huge", 1e6), ("beyond", 1e8)])
def test_large_scores_have_both_signs(kind, size):
    s = scores(build_problem(Case(f"kind_{kind}", inputs=kind, q_rows=20)))
    assert 0.5 * size < s.std() < 2 * size
    assert s.min() < 0 < s.max()


def test_an_outlier_channel_is_a_hundred_times_the_others():
    q = build_problem(Case("kind_outlier", inputs="outlier", q_rows=50)).q
    size = np.abs(q).mean(axis=(0, 1, 2))
    assert size.max() > 50 * np.median(size)


def test_do_per_head_spans_twenty_powers_of_two():
    do = build_problem(Case("kind_do", inputs="per_head_do", batch=2, heads=4)).do
    size = np.abs(do).mean(axis=(2, 3)).ravel()
    assert 2**18 < size.max() / size.min() < 2**22


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_follows_from_the_name(kind):
    a, b, c = (build_problem(Case(name, inputs=kind)) for name in ("a", "a", "b"))
    assert a.v.tobytes() == b.v.tobytes() != c.v.tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_lengths": (5, 0), "q_lengths": (8, 3), "batch": 2},
        {"window": (1, 0), "kv_rows": 30},
        {"masks": (("bool", "11qk", "top_left_half"),), "bias": "11qk"},
        {"q_packed": (3, 0, 2), "kv_packed": (4, 2, 0), "q_tail": 2, "kv_tail": 1, "bias": "hqk"},
    ],
)
def test_hidden_poison_lies_where_nobody_looks(fields):
    case = Case("hidden", poison="nan_hidden", dlse=True, heads=4, kv_heads=2, **fields)
    problem = build_problem(case)
    clean = build_problem(Case("hidden", dlse=True, heads=4, kv_heads=2, **fields))
    assert np.isnan(problem.k).any()
    assert not np.isnan(problem.k).all()
    for poisoned, before in ((problem.q, clean.q), (problem.k, clean.k), (problem.do, clean.do)):
        same = ~np.isnan(poisoned)
        assert (poisoned[same] == before[same]).all()
    if not case.packed:
        for b, h in np.ndindex(case.batch, case.heads):
            see = visible(problem.options, b, h, case.q_rows, case.kv_rows)
            assert not np.isnan(problem.k[b, h // 2][see.any(axis=0)]).any()
            assert not np.isnan(problem.q[b, h][see.any(axis=1)]).any()
            assert np.isnan(problem.q[b, h][~see.any(axis=1)]).all()


@pytest.mark.parametrize("poison", ["nan_q", "nan_k", "nan_v", "nan_bias", "inf_bias", "inf_v"])
def test_visible_poison_is_one_number_that_somebody_sees(poison):
    case = Case("seen", poison=poison, causal=True, bias="11qk", q_rows=6)
    problem = build_problem(case)
    tensors = (problem.q, problem.k, problem.v, problem.options.bias)
    odd = [int((~np.isfinite(x)).sum()) for x in tensors]
    assert sum(odd) == 1
    assert odd.index(1) == ("q", "k", "v", "bias").index(poison.split("_")[1])


@pytest.mark.parametrize("view", [v for v in VIEWS if not v.startswith("far")])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_view_has_the_numbers_of_its_source(view, dtype):
    case = Case("view", views=(("q k v do", view),), batch=2, dtype=dtype)
    problem = build_problem(case)
    call = build_call(case, problem)
    for name in ("q", "k", "v", "do"):
        placed, plain = getattr(call, name), getattr(problem, name)
        assert placed.tobytes() == plain.tobytes()
        strides = [s // placed.dtype.itemsize for s in placed.strides]
        if view.startswith("same"):
            assert 0 in strides
        elif view in ("stepped", "dims_first"):
            assert strides[-1] > 1
        else:
            assert strides[-1] == 1
        if view in ("stepped", "gapped", "guarded") or view.startswith("offset"):
            around = root(placed).astype(np.float64)
            assert np.isnan(around).sum() == around.size - placed.size


@pytest.mark.parametrize("elements", [1, 2, 3])
def test_offsets_break_alignment(elements):
    x = VIEWS[f"offset_{elements}"](np.zeros((2, 3), np.float32))
    assert x.__array_interface__["data"][0] % 16 == 4 * elements


@pytest.mark.parametrize("axis", [0, -2])
def test_far_views_pass_2_to_the_31(axis):
    x = np.arange(24, dtype=np.float16).reshape(4, 1, 3, 2)
    view = VIEWS["far_batch" if axis == 0 else "far_rows"](x)
    assert np.array_equal(view, x)
    assert view.strides[axis] // 2 * (x.shape[axis] - 1) > 2**31 - 1 - 2**21
