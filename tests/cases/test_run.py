# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""run_case must fail a library that is wrong, and must say what was wrong.

The library is replaced by one that computes with the oracle and then makes one mistake.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import fulmen
from fulmen.lab.cases import Case, run, run_case
from fulmen.lab.cases.arithmetic import reference
from fulmen.lab.cases.arrays import dtype_of
from fulmen.lab.cases.error_rule import NAMES
from fulmen.lab.cases.oracle import evaluate

CASE = Case("wrong_libraries", causal=True, q_rows=12, need_each=True, out="guarded")


class Library:
    """Answers from the oracle. A mistake is a function that changes what is about to return."""

    def __init__(self, case, mistake=None):
        self.case, self.mistake = case, mistake or (lambda what, x, call: None)
        self.results = evaluate(run.problem_of(case), reference(case.dtype))

    def result(self, name):
        kind = "float32" if name in ("lse", "dsinks") else self.case.dtype
        return np.array(getattr(self.results, name)).astype(dtype_of(kind))

    def attention_forward(self, q, k, v, out=None, **options):
        o, lse = self.result("o"), self.result("lse")
        returned = SimpleNamespace(o=o, lse=lse, stats=None)
        if out is not None:
            out[...] = o
            returned.o = out
        self.mistake("forward", returned, SimpleNamespace(q=q, k=k, v=v, out=out))
        return returned

    def attention_backward(self, do, q, k, v, o, stats, need=(), **options):
        names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}
        found = {n: self.result(n) if key in need else None for key, n in names.items()}
        returned = SimpleNamespace(**found)
        self.mistake("backward", returned, SimpleNamespace(do=do, q=q, need=need, **options))
        return returned


@pytest.fixture
def library(monkeypatch):
    def put(case, mistake=None):
        made = Library(case, mistake)
        for name in ("attention_forward", "attention_backward"):
            monkeypatch.setattr(fulmen, name, getattr(made, name), raising=False)

    return put


def test_a_right_library_passes(library):
    library(CASE)
    outcome = run_case(CASE)
    assert outcome.status == "passed", outcome.message
    assert 0 < outcome.ratio < 1
    assert outcome.message.split(":")[0] in NAMES


def writes_into_q(what, returned, call):
    if what == "forward":
        call.q[0, 0, 0, 0] += 1


def writes_behind_out(what, returned, call):
    if what == "forward":
        call.out.base[0] = 0


def forgets_out(what, returned, call):
    if what == "forward":
        returned.o = np.array(call.out) + 1


def float64_lse(what, returned, call):
    if what == "forward":
        returned.lse = returned.lse.astype(np.float64)


def wrong_dk(what, returned, call):
    if what == "backward" and returned.dk is not None:
        returned.dk[0, 1, 5, 3] += 0.01


def no_dv(what, returned, call):
    if what == "backward":
        returned.dv = None


def too_much(what, returned, call):
    if what == "backward" and returned.dq is None:
        returned.dq = np.zeros_like(call.q)


def other_bits_alone(what, returned, call):
    if what == "backward" and call.need == ("q",):
        returned.dq[0, 0, 11, 0] = np.nextafter(returned.dq[0, 0, 11, 0], np.float32(9))


def nan_in_an_empty_tail(what, returned, call):
    if what == "forward":
        returned.lse[0, 0, 0] = np.nan


def breaks(what, returned, call):
    raise ZeroDivisionError("by zero")


MISTAKES = {
    writes_into_q: "was written to",
    writes_behind_out: "around the caller's output",
    forgets_out: "is not what lies in",
    float64_lse: "lse is float64, not float32",
    wrong_dk: "dk: error",
    no_dv: "dv is missing",
    too_much: "dq is not asked for",
    other_bits_alone: "dq alone differs",
    nan_in_an_empty_tail: "lse: NaN differs",
    breaks: "ZeroDivisionError: by zero",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_wrong_library_fails(library, mistake):
    library(CASE, mistake)
    outcome = run_case(CASE)
    assert outcome.status == "failed"
    assert MISTAKES[mistake] in outcome.message


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_gap_is_skipped_with_its_sentence_before_the_oracle_is_asked(library, monkeypatch, step):
    def gap(what, returned, call):
        if what == step:
            raise fulmen.UnsupportedError("nothing here computes that")

    def never(*_):
        raise AssertionError("the oracle was asked")

    library(CASE, gap)
    run.oracle_of.cache_clear()
    monkeypatch.setattr(run, "consult", never)
    outcome = run_case(CASE)
    assert (outcome.status, outcome.message) == ("skipped", "nothing here computes that")


def test_bits_that_differ_from_call_to_call_fail(library):
    case = Case("twice", check="same", others=({},), gradients=())
    calls = []

    def drifts(what, returned, call):
        calls.append(what)
        if len(calls) == 3:
            returned.o[0, 0, 0, 0] = np.nextafter(returned.o[0, 0, 0, 0], np.float32(9))

    library(case, drifts)
    assert "o differs with the same call again" in run_case(case).message


def test_an_option_that_is_ignored_fails(library):
    case = Case("ignored", check="differs", others=({"softcap": 5.0},), gradients=())
    library(case)
    assert "o is the same with" in run_case(case).message


def test_a_call_that_should_be_refused_fails_when_accepted(library):
    case = Case("accepted", check="refused", heads=3, kv_heads=2, gradients=())
    library(Case("ignored_here", heads=3))
    assert run_case(case).message == "the call was accepted"


def test_a_key_that_is_not_copied_fails_exact(library):
    case = Case("one_key", kv_rows=1, exact=True, gradients=())

    def last_bit(what, returned, call):
        returned.o[0, 0, 0, 0] = np.nextafter(returned.o[0, 0, 0, 0], np.float32(9))

    library(case, last_bit)
    assert "is not its v" in run_case(case).message


def test_gradients_beyond_the_rule_must_be_finite(library):
    case = Case("beyond_it", inputs="beyond", finite_gradients=True)

    def infinite(what, returned, call):
        if what == "backward":
            returned.dq[0, 0, 0, 0] = np.inf

    library(case, infinite)
    assert "dq: 1 numbers are not finite" in run_case(case).message


class AddsInAnyOrder:
    """Each call has other last bits of dq; `deterministic` ones where it is asked to."""

    def __init__(self, always: bool) -> None:
        self.always, self.calls = always, 0

    def __call__(self, what, returned, call):
        if what == "backward" and returned.dq is not None:
            self.calls += 1
            if self.always or not getattr(call, "deterministic", False):
                returned.dq[0, 0, 11, 0] *= np.float32(1 + self.calls * 2.0**-23)


SAME = replace(CASE, name="bits", check="same", others=({}, {"window": (-1, 0)}))


@pytest.mark.parametrize("case", [CASE, SAME], ids=lambda case: case.check)
def test_bits_of_gradients_are_those_of_deterministic_calls_on_a_gpu(library, case):
    library(case, AddsInAnyOrder(always=False))
    assert run_case(case, "cuda", "simt").status == "passed"
    outcome = run_case(case, "cpu", "scalar")
    assert outcome.status == "failed"
    assert "dq" in outcome.message
    library(case, AddsInAnyOrder(always=True))
    assert run_case(case, "cuda", "simt").status == "failed"


def test_a_plain_gradient_alone_obeys_the_rule(library):
    def wrong_alone(what, returned, call):
        if what == "backward" and call.need == ("k",) and not hasattr(call, "deterministic"):
            returned.dk[0, 1, 5, 3] += 0.01

    library(CASE, wrong_alone)
    assert run_case(CASE, "cuda", "simt").message.startswith("dk: error")


def test_a_gradient_that_is_made_beside_others_only_is_no_gap(library):
    def refuses(what, returned, call):
        if what == "backward" and call.need == ("v",):
            raise fulmen.UnsupportedError("dv beside others only")

    library(CASE, refuses)
    assert run_case(CASE, "cuda", "simt").status == "passed"
