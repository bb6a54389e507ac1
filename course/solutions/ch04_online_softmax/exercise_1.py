# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 4.1: the one trap is a state of no keys, where m - new is -inf - -inf."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of NumPy


class State(NamedTuple):
    """What is known of a row after some keys; of no keys: m = -inf, l = 0, O = 0."""

    m: float  # the largest score
    l: float
    O: Array


def of_block(s: Array, v: Array) -> State:
    """The state after the keys with scores s (key) and values v (key, dim); there may be none."""
    if len(s) == 0:
        return State(-math.inf, 0.0, np.zeros(v.shape[1]))
    m = float(s.max())
    p = np.exp(s - m)
    return State(m, float(p.sum()), p @ v)


def merge(a: State, b: State) -> State:
    """The state after the keys of both, from the two states alone."""
    new = max(a.m, b.m)
    if new == -math.inf:
        return a
    x, y = math.exp(a.m - new), math.exp(b.m - new)
    return State(new, a.l * x + b.l * y, a.O * x + b.O * y)
