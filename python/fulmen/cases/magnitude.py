# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A of the error rule: each result again with every term replaced by its absolute value.

A sum whose terms cancel cannot be more exact than the rounding of its terms; A times the epsilon of
the arithmetic is that floor. Probabilities stay what they are. Computed in the reference type, one
number for each number of the results; error_rule takes the largest of a row.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Arithmetic
from .arrays import Array
from .oracle import Head, HeadGradients, Problem, Results, Segment, attend, segments
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


def gradient_magnitude(
    problem: Problem, at: Segment, head: Head, o: Array, ar: Arithmetic
) -> HeadGradients:
    """The steps of oracle.gradients on absolute values; o is |p| |v|."""
    assert problem.do is not None
    q, k = abs(ar.cast(problem.q[at.q_at])), abs(ar.cast(problem.k[at.kv_at]))
    v, do = abs(ar.cast(problem.v[at.kv_at])), abs(ar.cast(problem.do[at.q_at]))
    sees_any = head.visible.any(axis=1)
    delta = np.where(sees_any, ar.sum_rows(do * o), ar.number(0))
    dp = ar.dot(do, v.T) * head.drop
    dlse = np.zeros_like(delta) if problem.dlse is None else abs(ar.cast(problem.dlse[at.q_at]))
    ds = head.p * (dp + delta[:, None]) + head.p_keys * dlse[:, None]
    ds = np.where(head.visible, ds, ar.number(0))
    # chain = 1 - t^2 cancels when the cap saturates: with absolute values it is 1 + t^2
    dx = ds * (2 - head.chain) if problem.options.softcap else ds
    scale = abs(ar.number(problem.options.scale_for(q.shape[1])))
    return HeadGradients(
        dq=scale * ar.dot(dx, k, head.visible),
        dk=scale * ar.dot(dx.T, q, head.visible.T),
        dv=ar.dot((head.p * head.drop).T, do, head.visible.T),
        ds=ds,
        dsink=(np.where(sees_any, head.p_sink, ar.number(0)) * delta).sum(),
    )


def magnitudes(problem: Problem, ar: Arithmetic) -> Results:
    """A for every output: the shapes are those of oracle.evaluate."""
    q, k, v, options = problem.q, problem.k, problem.v, problem.options
    o = np.zeros((*q.shape[:-1], v.shape[-1]), ar.work)
    lse = np.zeros(q.shape[:-1], ar.work)
    backward = problem.do is not None
    dq, dk, dv = (np.zeros(x.shape, ar.work) for x in (q, k, v))
    dsinks = np.zeros(q.shape[-3], ar.work)
    dbias = None
    if backward and options.bias is not None:
        dbias = np.zeros((*q.shape[:3], k.shape[2]), ar.work)
    with np.errstate(all="ignore"):
        for at in segments(problem):
            head = attend(problem, at, ar)
            o[at.q_at] = ar.dot(head.p * head.drop, abs(ar.cast(v[at.kv_at])), head.visible)
            s = np.where(head.visible, score_magnitude(problem, at, ar), ar.number(0))
            log_l = np.log(np.where(head.visible, head.e, ar.number(0)).sum(axis=1))
            sees_any = head.visible.any(axis=1)
            lse[at.q_at] = (head.p_keys * s).sum(axis=1) + np.where(sees_any, abs(log_l), 0)
            if not backward:
                continue
            g = gradient_magnitude(problem, at, head, o[at.q_at], ar)
            dq[at.q_at] = g.dq
            dk[at.kv_at] += g.dk
            dv[at.kv_at] += g.dv
            dsinks[at.head] += g.dsink
            if dbias is not None:
                dbias[at.batch, at.head] = g.ds
        if not backward:
            return Results(o, lse)
        if dbias is not None:
            assert options.bias is not None
            dbias = ar.sum_to(dbias, options.bias.shape)
        return Results(o, lse, dq, dk, dv, dbias, None if options.sinks is None else dsinks)
