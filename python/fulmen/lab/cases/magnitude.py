# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The floors of the error rule: each result again with every term replaced by its absolute value.

A sum whose terms cancel cannot be more exact than the rounding of its terms: A times the epsilon of
the arithmetic is that floor. A second floor is what a row inherits from the steps before it, to
first order: an error d of the scores changes a probability by 2 d p, the rounding of a 16-bit o
changes delta, and numbers below the smallest normal one may become 0. The third is the size that
the error of the plain computation has when it is neither lucky nor unlucky: where it rounds P and
dS to 16 bits, a random walk of half ulps. Computed in the reference type, one number for each
number of the results; error_rule takes the largest of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arithmetic import Arithmetic
from .arrays import Array, ulp
from .oracle import Accumulator, Head, HeadGradients, Results, attend, gradients, nonzero, output
from .scores import modified_magnitude
from .visible import Problem, Segment, distance, pick, segments


def score_magnitude(problem: Problem, at: Segment, ar: Arithmetic) -> Array:
    """|scale| * |q| |k| + |bias| + |slope| * distance: (q_row, kv_row)."""
    options = problem.options
    q, k = abs(ar.cast(problem.q[at.q_at])), abs(ar.cast(problem.k[at.kv_at]))
    head_at = (at.batch, at.head, len(q), len(k))
    s: Array = abs(options.scale_for(q.shape[1])) * ar.dot(q, k.T)
    s = modified_magnitude(s, options)
    if options.bias is not None:
        s = s + abs(ar.cast(pick(options.bias, *head_at)))
    if options.alibi_slopes is not None:
        slope = abs(ar.cast(np.atleast_2d(options.alibi_slopes)))
        slope = slope[at.batch if len(slope) > 1 else 0, at.head]
        s = s + slope * distance(options, at.batch, len(q), len(k))
    return s


def score_error(
    problem: Problem, at: Segment, head: Head, fair: Arithmetic, ar: Arithmetic
) -> Array:
    """The largest error that the plain computation makes in the scores of a row: (q_row,).

    No row counts for less than the median row of its head: a row may be lucky.
    """
    plain = ar.cast(attend(problem, at, fair).s)
    with np.errstate(invalid="ignore"):
        error = abs(plain - head.s)
    rows = np.where(np.isfinite(error), error, ar.number(0)).max(axis=1, initial=0)
    return np.asarray(np.maximum(rows, np.median(rows)) if len(rows) else rows)


def delta_error(
    problem: Problem, at: Segment, head: Head, fair: Arithmetic, ar: Arithmetic
) -> Array:
    """How far the rounding of o may move delta = rowsum(do * o): (q_row,), 0 without 16 bits.

    A random walk of half ulps: twice their root sum of squares is 3.5 standard deviations. Numbers
    that 16 bits hold exactly, as where a row sees one key, add nothing.
    """
    if problem.do is None or fair.storage is None:
        return np.zeros_like(head.lse)
    o = ar.dot(head.p * head.drop, ar.cast(problem.v[at.kv_at]), head.visible)
    half_ulp = np.where(o.astype(fair.storage).astype(ar.work) == o, 0, ulp(o, fair.storage) / 2)
    step = ar.cast(problem.do[at.q_at]) * half_ulp
    sees_any = np.asarray(head.visible.any(axis=1))
    step = np.where(sees_any[:, None] & np.isfinite(step), step, ar.number(0))
    return np.asarray(2 * np.sqrt(ar.sum_rows(step**2)))


class Probabilities(NamedTuple):
    """The probabilities of a head, or errors of them."""

    p: Array  # (q_row, kv_row)
    p_keys: Array  # (q_row, kv_row)
    p_sink: Array  # (q_row,)


def probability_errors(head: Head, score_errors: Array, smallest: float) -> Probabilities:
    """2 d p for an error d of the scores, the score's own and that of the sum; and underflow."""
    twice = 2 * score_errors
    p, p_keys = (
        np.where(head.visible, x * twice[:, None] + smallest, np.zeros_like(x))
        for x in (head.p, head.p_keys)
    )
    return Probabilities(p, p_keys, head.p_sink * twice + smallest)


def head_magnitude(
    problem: Problem, at: Segment, head: Head, of: Probabilities, ar: Arithmetic
) -> tuple[Array, HeadGradients | None]:
    """The steps of oracle.output and oracle.gradients on absolute values.

    `of` stands where a probability is a factor of the result: itself, or its error.
    """
    q, k = abs(ar.cast(problem.q[at.q_at])), abs(ar.cast(problem.k[at.kv_at]))
    v = abs(ar.cast(problem.v[at.kv_at]))
    p, p_keys, p_sink = of
    o = ar.dot(p * head.drop, v, head.visible)
    if problem.do is None:
        return o, None
    do = abs(ar.cast(problem.do[at.q_at]))
    sees_any = head.visible.any(axis=1)
    delta = ar.sum_rows(do * ar.dot(head.p * head.drop, v, head.visible))
    delta = np.where(sees_any, delta, ar.number(0))
    dp = ar.dot(do, v.T) * head.drop
    dlse = np.zeros_like(delta) if problem.dlse is None else abs(ar.cast(problem.dlse[at.q_at]))
    ds = p * (dp + delta[:, None]) + p_keys * dlse[:, None]
    ds = np.where(head.visible, ds, ar.number(0)) * abs(head.own)
    # chain = 1 - t^2 cancels when the cap saturates: with absolute values it is 1 + t^2
    dx = ds * (2 - head.chain)
    scale = abs(ar.number(problem.options.scale_for(q.shape[1])))
    return o, HeadGradients(
        dq=scale * ar.dot(dx, k, head.visible),
        dk=scale * ar.dot(dx.T, q, head.visible.T),
        dv=ar.dot((p * head.drop).T, do, head.visible.T),
        ds=ds,
        dsink=(np.where(sees_any, p_sink, ar.number(0)) * delta).sum(),
    )


def delta_squares(
    problem: Problem, at: Segment, head: Head, error: Array, ar: Arithmetic
) -> HeadGradients:
    """The squares of what an error of delta makes of the gradients: rows are independent.

    It is one number for all keys of a row: the terms of dq keep their signs, and those of a dbias
    that is summed over the keys are added before they are squared.
    """
    q, k = ar.cast(problem.q[at.q_at]), ar.cast(problem.k[at.kv_at])
    scale = ar.number(problem.options.scale_for(q.shape[1]))
    ds = np.where(head.visible, head.p * error[:, None], ar.number(0)) * head.own
    dx = ds * head.chain
    bias = problem.options.bias
    if bias is not None and bias.shape[-1] == 1 and ds.shape[1]:
        ds = np.concatenate([ds.sum(axis=1, keepdims=True), np.zeros_like(ds[:, 1:])], axis=1)
    return HeadGradients(
        dq=(scale * ar.dot(dx, k, head.visible)) ** 2,
        dk=scale**2 * ar.dot(dx.T**2, q**2, head.visible.T),
        dv=np.zeros_like(ar.cast(problem.v[at.kv_at])),
        ds=ds**2,
        dsink=((head.p_sink * error) ** 2).sum(),
    )


def rounding_squares(
    problem: Problem, at: Segment, head: Head, storage: np.dtype[Any], ar: Arithmetic
) -> tuple[Array, HeadGradients | None]:
    """The squares of what plain's roundings of P and dS to 16 bits, or 8, make of the results.

    Half an ulp each, which no sum of another order or with another row maximum can foresee. A row
    with one key is left out: its P is 1 in every implementation.
    """
    v = ar.cast(problem.v[at.kv_at])
    is_rounded = head.visible & (head.p != 1)

    def squares(x: Array) -> Array:
        half_ulp = np.where(is_rounded & (x != 0), ulp(x, storage) / 2, ar.number(0))
        return np.asarray(half_ulp**2)

    over_l = (head.top_up / nonzero(head.l_total))[:, None]
    o = ar.dot(squares(head.e * head.drop), v**2, head.visible) * over_l**2
    if problem.do is None:
        return o, None
    q, k, do = (ar.cast(x) for x in (problem.q[at.q_at], problem.k[at.kv_at], problem.do[at.q_at]))
    scale = ar.number(problem.options.scale_for(q.shape[1]))
    exact = gradients(problem, at, head, output(head, v, ar), ar)
    dx = squares(exact.ds * head.chain)
    return o, HeadGradients(
        dq=scale**2 * ar.dot(dx, k**2, head.visible),
        dk=scale**2 * ar.dot(dx.T, q**2, head.visible.T),
        dv=ar.dot(squares(head.p * head.drop).T, do**2, head.visible.T),
        ds=np.zeros_like(exact.ds),
        dsink=ar.number(0),
    )


def combined(sums: Results, squares: Results, smallest: float) -> Results:
    """Sums of absolute errors, plus the roots of sums of squares, plus an underflow."""

    def both(name: str) -> Array | None:
        x: Array | None = getattr(sums, name)
        return None if x is None else x + np.sqrt(getattr(squares, name)) + smallest

    gradients = (both(name) for name in ("dq", "dk", "dv", "dbias", "dsinks"))
    return Results(sums.o + smallest, sums.lse, *gradients)


def roots(squares: Results) -> Results:
    """The square root of each number."""

    def root(x: Array | None) -> Array | None:
        return None if x is None else np.sqrt(x)

    o, lse, *of_gradients = squares
    return Results(np.sqrt(o), lse, *(root(x) for x in of_gradients))


def magnitudes(
    problem: Problem, ar: Arithmetic, fair: Arithmetic
) -> tuple[Results, Results, Results]:
    """The three floors of every output, in the shapes of oracle.evaluate.

    Args:
        problem: what is computed.
        ar: the reference.
        fair: the plain arithmetic.

    Returns:
        A, to be multiplied by an epsilon; the inherited errors, as they are; and the typical error
        of rounding to 16 bits, 0 for wider types.
    """
    smallest = ar.number(np.finfo(fair.work).tiny)
    terms, sums, squares, walks = (Accumulator(problem, ar) for _ in range(4))
    for floor in (sums, squares, walks):
        floor.lse[...] = 0  # A has the scores themselves
    with np.errstate(all="ignore"):
        for at in segments(problem):
            head = attend(problem, at, ar)
            itself = Probabilities(head.p, head.p_keys, head.p_sink)
            terms.add(at, *head_magnitude(problem, at, head, itself, ar))
            s = score_magnitude(problem, at, ar)
            if problem.options.expression:  # each step of it rounds by its own size
                s = s * np.maximum(abs(head.own), 1) + abs(head.s)
            s = np.where(head.visible, s, ar.number(0))
            log_l = np.log(np.where(head.visible, head.e, ar.number(0)).sum(axis=1))
            sees_any = head.visible.any(axis=1)
            terms.lse[at.q_at] = (head.p_keys * s).sum(axis=1) + np.where(sees_any, abs(log_l), 0)
            of_scores = score_error(problem, at, head, fair, ar)
            if (
                fair.rounds_inputs
            ):  # lse is that of scores of 8 bits, which differ by their rounding
                sums.lse[at.q_at] = np.where(sees_any, of_scores, ar.number(0))
            errors = probability_errors(head, of_scores, smallest)
            if fair.weights is not None:
                walks.add(at, *rounding_squares(problem, at, head, fair.weights, ar))
            o, g = head_magnitude(problem, at, head, errors, ar)
            sums.add(at, o, g)
            if g is not None:
                error = delta_error(problem, at, head, fair, ar)
                squares.add(at, np.zeros_like(o), delta_squares(problem, at, head, error, ar))
        inherited = combined(sums.results(), squares.results(), smallest)
        return terms.results(), inherited, roots(walks.results())
