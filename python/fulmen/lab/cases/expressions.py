# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks as texts, and once more in NumPy, written independently of the library.

A case names one of EXPRESSIONS. Functions get the pairs of one head and arrays in the type of the
arithmetic: the same definition serves the reference and the plain computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .case import Case


Array = npt.NDArray[Any]


class Pairs(NamedTuple):
    """The pairs of one head: i and p are (q_row, 1), j is (kv_row,), the rest are numbers."""

    b: int
    h: int
    hk: int
    i: Array
    j: Array
    p: Array
    q_len: int
    kv_len: int
    captures: dict[str, Array]


def _none(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Expression:
    """A text or two, and what they mean; floats of captures get the type of parameters."""

    score: str = ""
    mask: str = ""
    captures: Callable[[Case, np.random.Generator], dict[str, Any]] = _none
    value: Callable[[Array, Pairs], tuple[Array, Array]] | None = None  # s', d s' / d s
    shows: Callable[[Pairs], Array] | None = None


def _slopes(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {"slope": 0.3 * rng.random(case.heads)}


def _table(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {"table": rng.standard_normal((case.heads, 17))}


def _documents(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    ids = np.sort(rng.integers(0, 3, (case.batch, max(case.q_rows, case.kv_rows))), axis=-1)
    return {"doc": ids.astype(np.int32)}


def _temperature(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {"heat": 0.5 + rng.random(case.heads), "shift": 0.25}


def _lengths(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {"first": rng.integers(0, case.kv_rows + 1, case.batch)}


def _alibi(s: Array, x: Pairs) -> tuple[Array, Array]:
    return s - x.captures["slope"][x.h] * abs(x.p - x.j).astype(s.dtype), np.ones_like(s)


def _relative(s: Array, x: Pairs) -> tuple[Array, Array]:
    return s + x.captures["table"][x.h, np.clip(x.j - x.p, -8, 8) + 8], np.ones_like(s)


def _capped(s: Array, x: Pairs) -> tuple[Array, Array]:
    t = np.tanh(s / s.dtype.type(3))
    return 3 * t, 1 - t * t


def _heated(s: Array, x: Pairs) -> tuple[Array, Array]:
    heat = x.captures["heat"][x.h]
    return s * heat + x.captures["shift"], np.full_like(s, heat)


def _buckets(s: Array, x: Pairs) -> tuple[Array, Array]:
    """T5's: near distances one by one, far ones by their logarithm."""
    n = np.maximum(x.p - x.j, 0)
    with np.errstate(divide="ignore"):
        far = 8 + np.floor(np.log(np.maximum(n, 1) / 7.9) / 0.7).astype(np.int64)
    return s + x.captures["table"][x.h, np.clip(np.where(n < 8, n, far), 0, 16)], np.ones_like(s)


def _mixed(s: Array, x: Pairs) -> tuple[Array, Array]:
    near = (abs(x.i - x.j) < 5) & np.ones(s.shape, bool)
    e = np.exp(-abs(s))
    smooth = s / 2 + e
    return np.where(near, s, smooth), np.where(near, 1, s.dtype.type(0.5) - np.sign(s) * e)


EXPRESSIONS: dict[str, Expression] = {
    "identity": Expression(score="s", value=lambda s, x: (s, np.ones_like(s))),
    "alibi": Expression("s - slope[h] * abs(p - j)", "", _slopes, _alibi),
    "relative": Expression("s + table[h, clamp(j - p, -8, 8) + 8]", "", _table, _relative),
    "capped": Expression("3 * tanh(s / 3)", value=_capped),
    "temperature": Expression("s * heat[h] + $shift", "", _temperature, _heated),
    "t5": Expression(
        "let n = max(p - j, 0);"
        "s + table[h, select(n < 8, n, 8 + floor(log(max(n, 1) / 7.9) / 0.7))]",
        "", _table, _buckets,
    ),
    "mixed": Expression("select(abs(i - j) < 5, s, s / 2 + exp(-abs(s)))", value=_mixed),
    "causal": Expression(mask="j <= p", shows=lambda x: x.j <= x.p),
    "or_first": Expression(
        "", "j <= p or j < first[b]", _lengths,
        shows=lambda x: (x.j <= x.p) | (x.j < x.captures["first"][x.b]),
    ),
    "documents": Expression(
        "", "doc[b, i] == doc[b, j]", _documents,
        shows=lambda x: x.captures["doc"][x.b, x.i] == x.captures["doc"][x.b, x.j],
    ),
    "sinks_and_window": Expression(
        mask="j <= p and (p - j < 6 or j < 2)",
        shows=lambda x: (x.j <= x.p) & ((x.p - x.j < 6) | (x.j < 2)),
    ),
    "dilated": Expression(
        mask="j <= p and (p - j) % 3 == 0", shows=lambda x: (x.j <= x.p) & ((x.p - x.j) % 3 == 0)
    ),
    "grid": Expression(  # NATTEN's neighbourhoods on rows of 6
        mask="abs(i // 6 - j // 6) <= 1 and abs(i % 6 - j % 6) <= 1",
        shows=lambda x: (abs(x.i // 6 - x.j // 6) <= 1) & (abs(x.i % 6 - x.j % 6) <= 1),
    ),
    "by_head": Expression(
        mask="(i + j + b) % 7 != h", shows=lambda x: (x.i + x.j + x.b) % 7 != x.h
    ),
    "nothing": Expression(mask="i < 3 and j >= kv_len", shows=lambda x: x.j < x.i * 0),
    "both": Expression(
        "s + table[h, clamp(j - p, -8, 8) + 8]", "(i + j) % 4 != hk % 4 or j == p", _table,
        _relative, lambda x: ((x.i + x.j) % 4 != x.hk % 4) | (x.j == x.p),
    ),
    "nan_where_hidden": Expression(
        "s + select(j <= p, 0.0, 0.0 / (i - i))", "j <= p",
        value=lambda s, x: (s, np.ones_like(s)), shows=lambda x: x.j <= x.p,
    ),
}  # fmt: skip
