# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The floors of the error rule: each result again with every term replaced by its absolute value.

A sum whose terms cancel cannot be more exact than the rounding of its terms: A times the epsilon of
the arithmetic is that floor. A second floor is what a row inherits from the steps before it, to
first order: an error d of the scores changes a probability by 2 d p, a probability below the
smallest normal number may become 0, and a 16-bit o that was rounded changes delta. Computed in the
reference type, one number for each number of the results; error_rule takes the largest of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arithmetic import Arithmetic
from .arrays import Array, ulp
from .oracle import (
    Accumulator,
    Head,
    HeadGradients,
    Problem,
    Results,
    Segment,
    attend,
    segments,
)
from .visible import distance, pick


def score_magnitude(problem: Problem, at: Segment, ar: Arithmetic) -> Array:
    """|scale| * |q| |k| + |bias| + |slope| * distance: (q_row, kv_row)."""
    options = problem.options
    q, k = abs(ar.cast(problem.q[at.q_at])), abs(ar.cast(problem.k[at.kv_at]))
    place = (at.batch, at.head, len(q), len(k))
    s: Array = abs(options.scale_for(q.shape[1])) * ar.dot(q, k.T)
    if options.softcap:  # cap * tanh(x / cap) keeps the absolute error of x and is at most cap
        s = np.minimum(s, options.softcap)
    if options.bias is not None:
        s = s + abs(ar.cast(pick(options.bias, *place)))
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


class HeadErrors(NamedTuple):
    """Absolute errors (or magnitudes) of what the results of a head are sums of."""

    p: Array  # (q_row, kv_row)
    p_keys: Array  # (q_row, kv_row)
    p_sink: Array  # (q_row,)
    delta: Array  # (q_row,)


def inherited_errors(
    problem: Problem, at: Segment, head: Head, fair: Arithmetic, ar: Arithmetic
) -> HeadErrors:
    """What no implementation of the plain arithmetic can avoid, before the last sums.

    The rounding of o moves delta by a random walk of its half ulps: twice their root sum of
    squares is 3.5 standard deviations.
    """
    twice = 2 * score_error(problem, at, head, fair, ar)
    smallest = ar.number(np.finfo(fair.work).tiny)
    p, p_keys = (
        np.where(head.visible, x * twice[:, None] + smallest, ar.number(0))
        for x in (head.p, head.p_keys)
    )
    delta = np.zeros_like(head.lse)
    if problem.do is not None and fair.storage is not None:
        v = ar.cast(problem.v[at.kv_at])
        o = ar.dot(head.p * head.drop, v, head.visible)
        step = ar.cast(problem.do[at.q_at]) * ulp(o, fair.storage) / 2
        delta = 2 * np.sqrt(ar.sum_rows(np.where(np.isfinite(step), step, ar.number(0)) ** 2))
    return HeadErrors(p, p_keys, head.p_sink * twice + smallest, delta)


def head_magnitude(
    problem: Problem, at: Segment, head: Head, error: HeadErrors, ar: Arithmetic
) -> tuple[Array, HeadGradients | None]:
    """The steps of oracle.output and oracle.gradients on absolute values and given errors."""
    q, k = abs(ar.cast(problem.q[at.q_at])), abs(ar.cast(problem.k[at.kv_at]))
    v = abs(ar.cast(problem.v[at.kv_at]))
    zero = ar.number(0)
    o = ar.dot(error.p * head.drop, v, head.visible)
    if problem.do is None:
        return o, None
    do = abs(ar.cast(problem.do[at.q_at]))
    sees_any = head.visible.any(axis=1)
    delta = ar.sum_rows(do * ar.dot(head.p * head.drop, v, head.visible))
    delta, delta_error, p_sink = (
        np.where(sees_any, x, zero) for x in (delta, error.delta, error.p_sink)
    )
    dp = ar.dot(do, v.T) * head.drop
    dlse = np.zeros_like(delta) if problem.dlse is None else abs(ar.cast(problem.dlse[at.q_at]))
    ds = error.p * (dp + delta[:, None]) + error.p_keys * dlse[:, None]
    # chain = 1 - t^2 cancels when the cap saturates: with absolute values it is 1 + t^2
    chain = 2 - head.chain if problem.options.softcap else np.ones_like(ds)
    scale = abs(ar.number(problem.options.scale_for(q.shape[1])))
    ds, of_delta = (
        np.where(head.visible, x, zero) for x in (ds, head.p * delta_error[:, None])
    )
    # an error of delta is one number for the whole row: its terms in dq keep their signs
    signed_k = ar.cast(problem.k[at.kv_at])
    row = abs(ar.dot(head.p * head.chain, signed_k, head.visible)) * delta_error[:, None]
    return o, HeadGradients(
        dq=scale * (ar.dot(ds * chain, k, head.visible) + row),
        dk=scale * ar.dot(((ds + of_delta) * chain).T, q, head.visible.T),
        dv=ar.dot((error.p * head.drop).T, do, head.visible.T),
        ds=ds + of_delta,
        dsink=(p_sink * delta + head.p_sink * delta_error).sum(),
    )


def magnitudes(problem: Problem, ar: Arithmetic, fair: Arithmetic) -> tuple[Results, Results]:
    """The two floors of every output, in the shapes of oracle.evaluate.

    Args:
        problem: what is computed.
        ar: the reference.
        fair: the plain arithmetic.

    Returns:
        A, to be multiplied by an epsilon; and the inherited errors, as they are.
    """
    terms, inherited = (Accumulator(problem, ar) for _ in range(2))
    with np.errstate(all="ignore"):
        for at in segments(problem):
            head = attend(problem, at, ar)
            itself = HeadErrors(head.p, head.p_keys, head.p_sink, np.zeros_like(head.lse))
            terms.add(at, *head_magnitude(problem, at, head, itself, ar))
            s = np.where(head.visible, score_magnitude(problem, at, ar), ar.number(0))
            log_l = np.log(np.where(head.visible, head.e, ar.number(0)).sum(axis=1))
            sees_any = head.visible.any(axis=1)
            terms.lse[at.q_at] = (head.p_keys * s).sum(axis=1) + np.where(sees_any, abs(log_l), 0)
            errors = inherited_errors(problem, at, head, fair, ar)
            inherited.add(at, *head_magnitude(problem, at, head, errors, ar))
            inherited.lse[at.q_at] = 0  # A has the scores themselves
        return terms.results(), inherited.results()
