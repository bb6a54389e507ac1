# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients in NumPy, one head at a time, every step an equation.

The arithmetic is a parameter: `reference` is wider than the inputs and says what is right, `plain`
is the straightforward computation in the type that a backend uses, and says how much error is fair
(see error_rule). The whole score matrix lies in memory: this answers "what?", never "how fast?".
Dense tensors are (batch, head, row, dim), packed ones (head, row, dim): a Segment finds a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .arithmetic import Arithmetic
from .arrays import Array
from .expressions import EXPRESSIONS
from .philox import drop_factors
from .scores import modified
from .visible import (
    Problem,
    Segment,
    distance,
    drawn_at,
    pair_shape,
    pairs_of,
    pick,
    segments,
    visible,
)


class Results(NamedTuple):
    """Outputs in the type of the arithmetic; gradients are None without do."""

    o: Array
    lse: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None
    dsinks: Array | None = None


@dataclass
class Head:
    """What lies between the scores and the output of one head; pairs are (q_row, kv_row)."""

    visible: Array
    s: Array  # the scores, -inf where hidden
    e: Array  # exp(s - m), 0 where hidden
    p: Array  # sums to 1 over a row, or to less where a sink takes its share
    p_keys: Array  # p without the sink: d lse / d s
    p_sink: Array  # (q_row,)
    chain: Array  # d modified(x) / d x
    own: Array  # d s' / d s of a score that the user wrote, else 1
    drop: Array  # 0, or 1 over the share that is kept
    top_up: Array  # (q_row,)  exp(m - max(m, sink))
    l_total: Array  # (q_row,)  relative to max(m, sink)
    lse: Array  # (q_row,)


def attend(problem: Problem, at: Segment, ar: Arithmetic) -> Head:
    """From scores to probabilities."""
    options = problem.options
    q, k = ar.cast(problem.q[at.q_at]), ar.cast(problem.k[at.kv_at])
    num_q, num_k, dim = len(q), len(k), q.shape[1]
    see = visible(options, at.batch, at.head, num_q, num_k)
    head_at = (at.batch, at.head, num_q, num_k)

    # s = modified(scale * dot(q, k)) + bias - slope * distance
    s = ar.number(options.scale_for(dim)) * ar.scores(q, k)
    s, chain = modified(s, options)
    chain = np.where(see, chain, ar.number(1))
    if options.bias is not None:
        s = s + ar.cast(pick(options.bias, *head_at))
    if options.alibi_slopes is not None:
        slope = ar.cast(np.atleast_2d(options.alibi_slopes))
        slope = slope[at.batch if len(slope) > 1 else 0, at.head]
        s = s - slope * ar.cast(distance(options, at.batch, num_q, num_k))

    # s' = f(s)
    own = np.ones_like(s)
    value = EXPRESSIONS[options.expression].value if options.expression else None
    if value is not None:
        read = {
            name: x if np.asarray(x).dtype.kind in "iub" else ar.cast(x)
            for name, x in options.captures.items()
        }
        pairs = pairs_of(options, (at.batch, at.head), options.group, num_q, num_k)
        s, own = value(s, pairs._replace(captures=read))
        own = np.where(see, own, ar.number(1))

    # m, e = exp(s - m), l; a row that sees nothing has m = -inf and subtracts 0 instead
    s = np.where(see, s, ar.number(-np.inf))
    m = s.max(axis=1, initial=-np.inf)
    shift = np.where(m == -np.inf, ar.number(0), m)
    e = np.where(see, np.exp(s - shift[:, None]), ar.number(0))
    l_keys = ar.sum_rows(e)

    # The sink enters relative to max(m, sink): exp(sink - m) may overflow.
    sink = ar.number(-np.inf)
    if options.sinks is not None:
        sink = ar.cast(options.sinks)[at.head]
    top = np.maximum(shift, sink)
    top_up, e_sink = np.exp(shift - top), np.exp(sink - top)
    l_total = l_keys * top_up + e_sink
    drop = np.ones_like(s)
    if options.dropout_p:
        plane = at.batch * problem.q.shape[-3] + at.head
        rows, keys = drawn_at(options, at.batch, num_q, num_k)
        last = (rows.max(initial=-1) + 1, keys.max(initial=-1) + 1)
        factors = drop_factors(options.dropout_p, options.rng, plane, *map(int, last))
        drop = ar.cast(factors[np.ix_(rows, keys)])
    zero = ar.number(0)  # a hidden pair stays 0 in a row whose sums are NaN
    return Head(
        visible=see,
        s=s,
        e=e,
        p=np.where(see, e * (top_up / nonzero(l_total))[:, None], zero),
        p_keys=np.where(see, e / nonzero(l_keys)[:, None], zero),
        p_sink=e_sink / nonzero(l_total),
        chain=chain,
        own=own,
        drop=drop,
        top_up=top_up,
        l_total=l_total,
        lse=m + np.log(l_keys),
    )


def nonzero(x: Array) -> Array:
    """X with 1 for 0: the denominator of a row that sees nothing."""
    return np.where(x == 0, np.ones_like(x), x)


def output(head: Head, v: Array, ar: Arithmetic) -> Array:
    """O = r((r(e * drop) V) / l_total), which is 0 for a row that sees nothing."""
    sums = ar.dot(ar.round_weights(head.e * head.drop), ar.values(v), head.visible)
    return ar.round(sums * (head.top_up / nonzero(head.l_total))[:, None])


class HeadGradients(NamedTuple):
    """What one head gives; dk and dv are not yet rounded, heads of a group are summed before."""

    dq: Array  # (q_row, dim)
    dk: Array  # (kv_row, dim)
    dv: Array  # (kv_row, dim_v)
    ds: Array  # (q_row, kv_row)  the gradient of the biased score
    dsink: Array  # ()


def gradients(problem: Problem, at: Segment, head: Head, o: Array, ar: Arithmetic) -> HeadGradients:
    """The gradient of sum(o * do) + sum(lse * dlse) for one head.

    Without sinks p_keys = p and dS = P * (dP - delta) with delta = rowsum(dO * O) - dlse; a sink
    has no part in lse, so with sinks the two terms have different probabilities.
    """
    assert problem.do is not None
    q, k = ar.cast(problem.q[at.q_at]), ar.cast(problem.k[at.kv_at])
    v, do = ar.cast(problem.v[at.kv_at]), ar.cast(problem.do[at.q_at])
    sees_any = head.visible.any(axis=1)
    delta = np.where(sees_any, ar.sum_rows(do * o), ar.number(0))
    dp = ar.dot(do, v.T) * head.drop
    dlse = np.zeros_like(delta) if problem.dlse is None else ar.cast(problem.dlse[at.q_at])
    if problem.options.sinks is None:
        ds = head.p * (dp - (delta - dlse)[:, None])
    else:
        ds = head.p * (dp - delta[:, None]) + head.p_keys * dlse[:, None]
    ds = np.where(head.visible, ds, ar.number(0)) * head.own
    dx = ar.round(ds * head.chain)
    scale = ar.number(problem.options.scale_for(q.shape[1]))
    kept = ar.round(head.p * head.drop)
    return HeadGradients(
        dq=ar.round(scale * ar.dot(dx, k, head.visible)),
        dk=scale * ar.dot(dx.T, q, head.visible.T),
        dv=ar.dot(kept.T, do, head.visible.T),
        ds=ds,
        dsink=-ar.sum_rows((np.where(sees_any, head.p_sink, ar.number(0)) * delta)[None])[0],
    )


class Accumulator:
    """Results that are put together head by head; heads of a group are summed before rounding."""

    def __init__(self, problem: Problem, ar: Arithmetic) -> None:
        """Zeros in the shapes of the outputs."""
        q, options = problem.q, problem.options
        self.problem, self.ar = problem, ar
        self.o = np.zeros((*q.shape[:-1], problem.v.shape[-1]), ar.work)
        self.lse = np.full(q.shape[:-1], -np.inf, ar.work)
        self.dq, self.dk, self.dv = (np.zeros(x.shape, ar.work) for x in (q, problem.k, problem.v))
        self.dsinks = np.zeros(q.shape[-3], ar.work)
        self.dbias: Array | None = None
        if problem.do is not None and options.bias is not None:
            self.dbias = np.zeros(pair_shape(problem), ar.work)

    def add(self, at: Segment, o: Array, g: HeadGradients | None) -> None:
        """Adds one head."""
        self.o[at.q_at] = o
        if g is None:
            return
        self.dq[at.q_at] = g.dq
        self.dk[at.kv_at] += g.dk
        self.dv[at.kv_at] += g.dv
        self.dsinks[at.head] += g.dsink
        if self.dbias is not None:
            num_q, num_k = g.ds.shape
            self.dbias[at.batch, at.head, :num_q, :num_k] = g.ds

    def results(self) -> Results:
        """The sums; gradients only where the problem has do."""
        options, ar = self.problem.options, self.ar
        if self.problem.do is None:
            return Results(self.o, self.lse)
        dbias = self.dbias
        if dbias is not None and options.bias is not None:
            dbias = ar.round_as(ar.sum_to(dbias, options.bias.shape), options.bias.dtype)
        dsinks = None if options.sinks is None else self.dsinks
        dk, dv = ar.round(self.dk), ar.round(self.dv)
        return Results(self.o, self.lse, self.dq, dk, dv, dbias, dsinks)


def evaluate(problem: Problem, ar: Arithmetic) -> Results:
    """Forward, and backward where the problem has do."""
    results = Accumulator(problem, ar)
    with np.errstate(all="ignore"):
        for at in segments(problem):
            head = attend(problem, at, ar)
            o = output(head, ar.cast(problem.v[at.kv_at]), ar)
            g = None if problem.do is None else gradients(problem, at, head, o, ar)
            results.add(at, o, g)
            results.lse[at.q_at] = head.lse
        return results.results()
