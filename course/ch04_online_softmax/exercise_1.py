# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 4.1: the state of a row, from one block of keys, and of two blocks together."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any  # of NumPy


class State(NamedTuple):
    """What is known of a row after some keys; of no keys: m = -inf, l = 0, O = 0."""

    m: float  # the largest score
    l: float
    O: Array


def of_block(s: Array, v: Array) -> State:
    """The state after the keys with scores s (key) and values v (key, dim); there may be none."""
    raise NotImplementedError


def merge(a: State, b: State) -> State:
    """The state after the keys of both, from the two states alone."""
    raise NotImplementedError
