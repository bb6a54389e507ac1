# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks of the caller's own, as text, with the arrays and numbers that they read.

    fulmen.attention(q, k, v, score=fulmen.score("s - slope[h] * abs(p - j)", slope=slope))
    fulmen.attention(q, k, v, mask="j <= p or j < 4")

The library parses the text; include/fulmen/fulmen.h, section 6, says what is in the language. A
value of this module says in `resolved` which options and arrays of a call it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from .errors import ArgumentError, DTypeError, shown
from .errors import text as errors_text

__all__ = ["Score", "score"]

# By the names of the schema; the library refuses a text that names more.
SCALARS, CAPTURES = (
    tuple(f"{name}{index}" for index in range(8)) for name in ("scalar", "capture")
)


@dataclass(frozen=True, eq=False)
class Score:
    """A score of the caller's; made by `fulmen.score`."""

    text: str
    captures: dict[str, Any] = field(default_factory=dict)


def score(text: str, **captures: Any) -> Score:
    """What a score becomes, as a text for `score=`.

    Args:
        text: an expression over s (the score after scale, softcap, bias and ALiBi), i and j (query
            row and key in their sequence), p (the row's position, i + shift), b, h and hk (batch
            entry, head, key/value head), q_len and kv_len, captured arrays and numbers; with
            + - * / // %, comparisons, and, or, not, min, max, abs, exp, log, tanh, sqrt, floor,
            clamp(x, least, most), select(condition, a, b) and `let name = value;` in front.
        **captures: arrays of floats, integers or bools, read as name[index, ...], an index for each
            axis, clamped to what there is (name alone: the one element that there is); and numbers,
            read as $name. Up to 8 of each in a call. Floating-point arrays have gradients.

    Raises:
        fulmen.Error: in the call that it is given to; with the column and a caret.

    >>> score("s + table[h, clamp(j - p, -2, 2) + 2]", table=[[0.0] * 5]).text
    's + table[h, clamp(j - p, -2, 2) + 2]'
    """
    return Score(errors_text("text of a score", text, "s * 0.5"), captures)


def resolved(score: Any, masks: tuple[Any, ...], number_of: Callable[..., int]) -> dict[str, Any]:
    """The options and arrays, by the names of the schema, that `score=` and mask texts stand for.

    Args:
        score: a Score, a str, or None.
        masks: values of fulmen.masks.expression, which must all hold.
        number_of: as `_library.expression_number`; another one where a compiler traces.

    Raises:
        Error: a text is not in the language, a capture is none, two of one name differ.
    """
    if score is None and not masks:
        return {}
    if isinstance(score, str):
        score = Score(errors_text("score", score, "s * 0.5"))
    if score is not None and not isinstance(score, Score):
        raise DTypeError(f"score is {shown(score)}; a str or fulmen.score(...) is expected")
    arrays: dict[str, Any] = {}
    numbers: dict[str, float] = {}
    for part in masks if score is None else (score, *masks):
        for name, x in part.captures.items():
            _add(name, x, numbers if isinstance(x, (Real, np.generic)) else arrays)
    if numbers and (both := arrays.keys() & numbers.keys()):
        raise ArgumentError(f"{min(both)} is an array in one expression and a number in another")
    mask = _both(masks)
    text = None if score is None else score.text
    found: dict[str, Any] = {"expression": number_of(text, mask, tuple(arrays), tuple(numbers))}
    found.update(zip(SCALARS, numbers.values()))
    found.update(zip(CAPTURES, arrays.values()))
    return found


def _both(masks: tuple[Any, ...]) -> str | None:
    """The texts of masks as one: as they are where there is one, so that columns are right."""
    if not masks:
        return None
    return masks[0].text if len(masks) == 1 else " and ".join(f"({part.text})" for part in masks)


def _add(name: str, x: Any, found: dict[str, Any]) -> None:
    if isinstance(x, (Real, np.generic)):
        x = float(x)
    elif isinstance(x, (list, tuple)):
        x = np.asarray(x)
    elif not hasattr(x, "shape"):
        raise DTypeError(f"{name} is {shown(x)}; an expression reads arrays and numbers")
    if name in found and not (found[name] is x or (isinstance(x, float) and found[name] == x)):
        raise ArgumentError(f"two expressions of the call read different {name}: name them apart")
    found[name] = x
