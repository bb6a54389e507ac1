# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The error rule: how far from the truth a row of a result may be. Used by everything that judges.

For every row,
    err(row) <= 2 * max(err_plain(row), median of err_plain over the rows of its head, walk(row))
                + 8 * eps(c) * A(row) + inherited(row) + ulp_output(largest |reference| of the row)
where err is the largest |x - reference| of the row, plain is the straightforward computation in
the type c of a backend (oracle under arithmetic.plain), walk is the error that its roundings to 16
bits make typically, A bounds the terms of its sums, inherited is what the errors of scores, of tiny
probabilities and of a 16-bit o make of the row (magnitude). Without these a row whose plain
computation is lucky fails every other good one: about 1 case in 20.
Numbers that are not finite must be the same in both: they have no error. Where plain is not finite
it excuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import plain, reference
from .arrays import Array, ulp
from .magnitude import magnitudes
from .oracle import Results, evaluate
from .visible import Problem

PLAIN_FACTOR = 2
EPSILON_FACTOR = 8
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Verdict:
    """What the rule says about one result."""

    passed: bool
    ratio: float  # the largest err / allowed over the rows; inf where a pattern differs
    where: tuple[int, ...]  # the row with that ratio
    message: str  # one sentence


def largest(x: Array) -> Array:
    """The largest finite number of each row, or 0."""
    return np.asarray(np.where(np.isfinite(x), x, 0).max(axis=-1, initial=0))


@dataclass(frozen=True)
class Fair:
    """What is fair to expect of rows along the last axis."""

    reference: Array  # the truth, in a wider type
    plain: Array  # the plain computation, for its error
    terms: Array  # A, at least 0
    inherited: Array  # errors from the steps before the last sums
    walk: Array  # the typical error of rounding to 16 bits
    eps: float  # of the arithmetic of plain
    head_axes: int  # how many leading axes name a head; the axes between are its rows


def allowance(fair: Fair, dtype: np.dtype[Any]) -> Array:
    """The right-hand side of the rule for every row of a result of this type."""
    with np.errstate(invalid="ignore"):
        plain_error = largest(abs(fair.plain - fair.reference))
    row_axes = tuple(range(fair.head_axes, plain_error.ndim))
    typical = np.median(plain_error, axis=row_axes, keepdims=True) if row_axes else plain_error
    return np.asarray(
        PLAIN_FACTOR * np.maximum(np.maximum(plain_error, typical), largest(fair.walk))
        + EPSILON_FACTOR * fair.eps * largest(fair.terms)
        + largest(fair.inherited)
        + ulp(largest(abs(fair.reference)), dtype)
    )


def judge_rows(got: Array, fair: Fair) -> Verdict:
    """Applies the rule to rows along the last axis; `got` has the type it was returned in."""
    reference = fair.reference
    if got.shape != reference.shape:
        return Verdict(False, np.inf, (), f"the shape is {got.shape}, not {reference.shape}")
    if got.size == 0:
        return Verdict(True, 0.0, (), "no rows")
    x = got.astype(reference.dtype)
    for name, kind in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differs = kind(x) != kind(reference)
        if differs.any():
            at = tuple(int(n) for n in np.argwhere(differs)[0])
            said = f"{name} differs in {int(differs.sum())} entries, first at {at}"
            return Verdict(
                False, np.inf, at[:-1], f"{said}: got {x[at]:.6g}, reference {reference[at]:.6g}"
            )
    with np.errstate(invalid="ignore"):
        error = largest(abs(x - reference))
    allowed = allowance(fair, got.dtype)
    ratio = error / allowed
    where = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    worst = float(ratio[where])
    said = f"error {float(error[where]):.3g} of {float(allowed[where]):.3g} allowed in row {where}"
    return Verdict(worst <= 1, worst, where, said)


def rows(name: str, x: Array, packed: bool) -> tuple[Array, int]:
    """A result as rows along its last axis, and how many leading axes name a head."""
    if name == "lse":
        return x[..., None], x.ndim - 1
    if name == "dsinks":
        return x[None], 0
    if name == "dbias":
        return x.reshape((1,) * (4 - x.ndim) + x.shape), 2
    return x, 1 if packed else 2


@dataclass(frozen=True)
class Oracle:
    """Everything the rule needs to know of a problem, in the shapes of oracle.evaluate."""

    reference: Results
    plain: Results
    terms: Results
    inherited: Results
    walk: Results
    eps: float
    packed: bool


def consult(problem: Problem, dtype: str, precision: str = "") -> Oracle:
    """Computes a problem in the reference arithmetic and in the plain one.

    Args:
        problem: what is asked.
        dtype: the type of q, k and v by name.
        precision: of float32 products, as in fulmen.attention; "" for float32; "e4m3" of q, k and v
            of that type on tensor cores.

    Returns:
        What `judge` compares results with.

    Raises:
        NotImplementedError: this machine has no type wider than the inputs.
    """
    exact, fair = reference(dtype), plain(dtype, precision)
    terms, inherited, walk = magnitudes(problem, exact, fair)
    return Oracle(
        evaluate(problem, exact),
        evaluate(problem, fair),
        terms,
        inherited,
        walk,
        fair.eps,
        problem.options.cu_q is not None,
    )


def judge(name: str, got: Array, oracle: Oracle) -> Verdict:
    """Judges one result by its name (one of NAMES), in the axes of oracle.evaluate."""
    expected = getattr(oracle.reference, name)
    if got.shape != expected.shape:
        return Verdict(False, np.inf, (), f"the shape is {got.shape}, not {expected.shape}")
    x, head_axes = rows(name, got, oracle.packed)
    sources = (oracle.reference, oracle.plain, oracle.terms, oracle.inherited, oracle.walk)
    truth, plain_rows, terms, inherited, walk = (
        rows(name, getattr(source, name), oracle.packed)[0] for source in sources
    )
    return judge_rows(x, Fair(truth, plain_rows, terms, inherited, walk, oracle.eps, head_axes))
