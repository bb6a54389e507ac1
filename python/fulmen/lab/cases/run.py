# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs one case on one implementation through the public functions and judges what comes back.

Called by pytest, `fulmen verify` and bench. The calls come first, so that a case which the library
refuses costs no oracle; the oracle's side of a case is then kept until other cases push it out, so
ask for all implementations of a case one after the other. An exception of the library is a failure
with its sentence; only UnsupportedError skips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

import fulmen

from . import appended, checks, indexed, rounded
from .arithmetic import reference
from .arrays import Array
from .case import Case
from .checks import CheckError, Run
from .error_rule import Oracle, consult, judge
from .placement import Host, OnGpu
from .problem import build_call, build_problem
from .visible import Problem


@dataclass(frozen=True)
class Outcome:
    """What a case said of an implementation."""

    status: str  # "passed", "failed" or "skipped"
    ratio: float  # the largest error / allowance of all its rows; 0 where nothing was measured
    message: str  # which result and row that was, or what went wrong


MOST_BYTES = 32 << 30  # that the arrays of a case may span on a GPU, where gaps are memory


@lru_cache(maxsize=4)
def problem_of(case: Case) -> Problem:
    """The arrays and options of a case."""
    return build_problem(case)


@lru_cache(maxsize=4)
def oracle_of(case: Case, precision: str = "") -> Oracle:
    """The oracle's answer to a case, by far the longest part of a large one."""
    return consult(problem_of(case), case.dtype, precision)


def precision_of(run: Run) -> str:
    """What plain products are where those of a run may be of 8 bits on tensor cores."""
    of_hopper: tuple[str, ...] = ("auto", "sm90")
    if run.case.precision == "fp8":  # "auto" computes as few rows in 16 bits
        of_hopper = () if run.case.gradients else ("sm90",)
    may_be = run.where["backend"] != "cpu" and run.where["implementation"] in of_hopper
    if run.case.precision:
        return run.case.precision if may_be or run.case.precision != "fp8" else ""
    eight_bits = run.case.eight_bits and run.case.kv_dtype == "float8_e4m3fn"
    may_be = may_be or (run.where["backend"] != "cpu" and run.where["implementation"] == "sm80")
    return "e4m3" if may_be and eight_bits else ""


def run_case(
    case: Case, backend: str = "cpu", implementation: str = "scalar", arrays: str = "numpy"
) -> Outcome:
    """Runs a case and judges it.

    Args:
        case: from fulmen.lab.cases.find or made by hand.
        backend: as in fulmen.attention.
        implementation: as in fulmen.attention.
        arrays: what the library is called with: "numpy", or copies on a GPU as "torch", "cupy" or
            "jax" arrays; "emulated": on the GPU that the emulator is.

    Returns:
        The outcome; no exception of the library leaves this function.
    """
    if said := _beyond(case, arrays):
        return Outcome("skipped", 0.0, said)
    problem = problem_of(case)
    call = build_call(case, problem)
    if arrays != "numpy" and (span := _span_bytes(call.inputs())) > MOST_BYTES:
        return Outcome("skipped", 0.0, f"its arrays span {span >> 30} GiB of a GPU's memory")
    where = {"backend": backend, "implementation": implementation}
    run = Run(case, problem, call, where, _memory(arrays))
    try:
        worst = (0.0, "nothing was measured")
        before = [checks.snapshot(x) for x in call.inputs()]
        for ratio, message in CHECKED[case.check](run):
            if not ratio <= 1:
                return Outcome("failed", ratio, message)
            worst = max(worst, (ratio, message))
        checks.unmodified(run, before)
    except (CheckError, appended.MisplacedError, indexed.MischosenError) as failure:
        return Outcome("failed", np.inf, str(failure))
    except fulmen.UnsupportedError as gap:
        return Outcome("skipped", 0.0, str(gap))
    except Exception as error:  # a case never ends the run of the others
        return Outcome("failed", np.inf, f"{type(error).__name__}: {error}")
    return Outcome("passed", *worst)


def results(
    case: Case, backend: str = "cpu", implementation: str = "scalar", arrays: str = "numpy"
) -> tuple[dict[str, Array], Oracle]:
    """What an implementation gives for a case, by name in the axes of the oracle, and the oracle's.

    Args:
        case: one that asks for gradients.
        backend: as in fulmen.attention.
        implementation: as in fulmen.attention.
        arrays: as in run_case.

    Raises:
        fulmen.Error: as fulmen.attention_forward and fulmen.attention_backward.
    """
    problem = problem_of(case)
    where = {"backend": backend, "implementation": implementation}
    run = Run(case, problem, build_call(case, problem), where, _memory(arrays))
    forward = run.forward()
    got = {"o": forward.o, "lse": forward.lse, **run.backward(forward, case.needs)}
    return {n: checks.head_major(n, x, case.packed) for n, x in got.items()}, oracle_of(case)


def gpu_bytes(case: Case) -> int:
    """What its arrays take of a GPU's memory, where gaps are memory; 0: it does not run there."""
    span = _span_bytes(build_call(case, problem_of(case)).inputs())
    return span if span <= MOST_BYTES else 0


def _memory(arrays: str) -> Host | OnGpu:
    if arrays == "numpy":
        return Host()
    from .gpu_arrays import placed

    return placed(arrays)


def _span_bytes(arrays: Iterable[Array]) -> int:
    """From the first to the last byte of each, together."""
    return sum(
        x.itemsize + sum((n - 1) * abs(s) for n, s in zip(x.shape, x.strides))
        for x in arrays
        if x.size
    )


def _beyond(case: Case, arrays: str) -> str:
    """Why a case is not for this machine or for arrays of a kind; "" where it is."""
    if case.check != "refused":
        try:
            reference(case.dtype)
        except NotImplementedError as gap:
            return str(gap)
    if arrays == "cupy" and case.kv_dtype.startswith("float8"):
        return "CuPy has no floating-point numbers of 8 bits"
    if arrays == "jax" and (case.out or case.check in ("refused", "appended", "accumulate")):
        return "JAX arrays cannot be written to"
    if arrays == "jax" and case.records:
        return "JAX arrays have no views, which v is of records"
    if arrays == "emulated":
        from . import emulator

        return emulator.beyond(case)
    return ""


Measured = Iterator["tuple[float, str]"]


def measure(run: Run, got: dict[str, Any]) -> Measured:
    """The verdict on each result by name, in the layout that the public functions return."""
    for name, returned in got.items():
        x = checks.head_major(name, returned, run.case.packed)
        if run.case.finite_gradients and name.startswith("d"):
            if not np.isfinite(x).all():
                raise CheckError(f"{name}: {int((~np.isfinite(x)).sum())} numbers are not finite")
            continue
        verdict = judge(name, x, oracle_of(run.case, precision_of(run)))
        yield verdict.ratio, f"{name}: {verdict.message}"


def check_rule(run: Run) -> Measured:
    """Forward and the gradients that the case names obey the error rule."""
    forward = run.forward()
    checks.dtypes(run.case, forward)
    gradients = run.backward(forward, run.case.needs) if run.case.gradients else {}
    yield from measure(run, {"o": forward.o, "lse": forward.lse, **gradients})
    if run.case.exact:
        checks.one_key_is_exact(run, forward.o)
    if run.case.need_each:
        for found in checks.each_alone(run, forward, gradients):
            yield from measure(run, found)


def check_same(run: Run) -> Measured:
    """The rule, and the same bits from every other way to write the call."""
    yield from check_rule(run)
    for found in checks.same_bits_with(run, run.case.others):
        yield from measure(run, found)


def check_alone(run: Run) -> Measured:
    """The rule, and each batch entry alone has the bits that it has among its neighbours."""
    yield from check_rule(run)
    checks.same_bits_alone(run)


def check_moved(run: Run) -> Measured:
    """The rule, and the same bits wherever the pages of caches lie and however many there are."""
    yield from check_rule(run)
    checks.same_bits_moved(run)


def check_repeat(run: Run) -> Measured:
    """Many batch entries that are one and the same: the first obeys the rule, all have its bits."""
    many = checks.repeated(run)
    for name, x in checks.results(many, many.repeatable).items():
        if not (x == x[:1]).all():
            raise CheckError(f"{name} differs between batch entries that are the same")
        yield from measure(run, {name: x[:1]})


def check_differs(run: Run) -> Measured:
    """The rule, and another o with each other value of the options: none of them is ignored."""
    yield from check_rule(run)
    checks.other_numbers_with(run, run.case.others)


def check_merge(run: Run) -> Measured:
    """Parts over disjoint keys, merged, obey the rule of the whole."""
    o, lse = checks.merged_parts(run)
    yield from measure(run, {"o": o, "lse": lse})


def check_accumulate(run: Run) -> Measured:
    """Parts over disjoint keys, each merged into what is there, obey the rule of the whole."""
    merged = checks.accumulated_parts(run)
    yield from measure(run, {"o": merged.o, "lse": merged.lse})
    if run.case.gradients:
        yield from measure(run, checks.accumulated_gradients(run, merged))


def check_appended(run: Run) -> Measured:
    """The rule over caches that append_kv filled; and the rotary embedding."""
    given = run.case, run.problem, run.memory
    k, v, table = appended.filled(*given)
    call = replace(run.call, k=k, v=v, options={**run.call.options, **table})
    forward = replace(run, call=call).forward()
    yield from measure(run, {"o": forward.o, "lse": forward.lse})
    yield from appended.rotated(*given)


def check_indexed(run: Run) -> Measured:
    """The keys that the indexer chooses."""
    indexed.takes(run.where["implementation"])
    yield from indexed.judged(run.case, run.problem, run.call, run.memory)


def check_rounded(run: Run) -> Measured:
    """Numbers of 8 bits, and the rotation before them."""
    rounded.takes(run.where["implementation"])
    yield from rounded.judged(run.case, run.problem, run.memory)


def check_refused(run: Run) -> Measured:
    """A call without a meaning is refused."""
    checks.refused(run)
    yield 0.0, "refused, and nothing was written"


CHECKED = {
    "rule": check_rule,
    "same": check_same,
    "alone": check_alone,
    "moved": check_moved,
    "repeat": check_repeat,
    "differs": check_differs,
    "merge": check_merge,
    "accumulate": check_accumulate,
    "refused": check_refused,
    "appended": check_appended,
    "indexed": check_indexed,
    "rounded": check_rounded,
}
