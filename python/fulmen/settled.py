# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The options of a call that are plain values: checked, and as the numbers of fulmen_problem.

What depends on values alone is computed once per combination and remembered.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from .choices import ALIGNMENTS, BACKENDS, IMPLEMENTATIONS, LAYOUTS, PRECISIONS, Layout
from .errors import ArgumentError, DTypeError


@lru_cache(maxsize=1024)
def settled(
    scale: Any,
    softcap: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    prefix: int,
    chunk: int,
    dropout_p: Any,
    rng: Any,
    max_q: Any,
    max_kv: Any,
    deterministic: Any,
    batch_invariant: Any,
    backend: Any,
    implementation: Any,
    layout: Any,
    packed: bool,
    precision: Any = "float32",
) -> tuple[tuple[float, ...], Layout]:
    """The numbers of fulmen_problem in order, and the axes."""
    p = _real("dropout_p", 0.0 if dropout_p is None else dropout_p)
    is_causal = _flag("causal", causal)
    numbers = (
        math.nan if scale is None else _scale(scale),
        _real("softcap", 0.0 if softcap is None else softcap),
        is_causal,
        _one_of("alignment", alignment, ALIGNMENTS),
        *_window(window, bool(is_causal)),
        prefix,
        chunk,
        p,
        *lots(rng, p),
        integer("max_q", 0 if max_q is None else max_q),
        integer("max_kv", 0 if max_kv is None else max_kv),
        _flag("deterministic", deterministic),
        _flag("batch_invariant", batch_invariant),
        _one_of("backend", backend, BACKENDS),
        _one_of("implementation", implementation, IMPLEMENTATIONS),
        _one_of("precision", precision, PRECISIONS),
    )
    return numbers, _layout(layout, packed)


def _real(name: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise DTypeError(f"{name} is {type(value).__name__}; a number is expected: float({name})")
    return float(value)


def _scale(value: Any) -> float:
    scale = _real("scale", value)
    if math.isnan(scale):
        raise ArgumentError("scale is NaN; any number is allowed, and None for 1 / sqrt(dim)")
    return scale


def _flag(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return int(value)
    hint = "; alignment='top_left' or 'bottom_right' says which corner" if name == "causal" else ""
    raise DTypeError(f"{name} is {value!r}; True or False is expected{hint}")


def integer(name: str, value: Any) -> int:
    """An integer of 64 bits from anything that is one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise DTypeError(f"{name} is {value!r}; an integer is expected") from None
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(f"{name} is {number}; a 64-bit integer is expected")
    return number


def _one_of(name: str, value: Any, allowed: dict[str, int]) -> int:
    if isinstance(value, str) and value in allowed:
        return allowed[value]
    raise ArgumentError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _window(window: Any, causal: bool) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ArgumentError(f"window has {len(window)} numbers; (left, right) has two")
        left, right = (-1 if side is None else integer("window", side) for side in window)
        return left, right
    if isinstance(window, bool):
        raise DTypeError(f"window is {window}; None, an integer or (left, right) is expected")
    width = integer("window", window)
    return width, (0 if causal and width >= 0 else width)


def lots(rng: Any, dropout_p: float) -> tuple[int, int]:
    """Seed and offset from what `rng=` says, as fulmen.h has them."""
    if rng is None:
        if dropout_p > 0:
            raise ArgumentError(
                f"dropout_p is {dropout_p} and rng is missing: rng=(seed, offset), two integers, "
                "says which entries are dropped"
            )
        return 0, 0
    try:
        seed, offset = (operator.index(number) for number in rng)
    except (TypeError, ValueError):
        raise DTypeError(f"rng is {rng!r}; (seed, offset), two integers, is expected") from None
    if not 0 <= seed < 2**64 or not 0 <= offset < 2**32:
        raise ArgumentError(
            f"rng is {(seed, offset)}; the seed is at least 0 and below 2**64, the offset below "
            "2**32"
        )
    return (seed if seed < 2**63 else seed - 2**64), offset


def _layout(layout: Any, packed: bool) -> Layout:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}")
    if not packed:
        return LAYOUTS[layout]
    if layout == "bhsd":  # the default: packed sequences are (total, heads, dim)
        layout = "shd"
    if LAYOUTS[layout].rank != 3:
        raise ArgumentError(
            f"layout is {layout!r}; sequences packed by cu_q are 'shd' (total, heads, dim) or 'hsd'"
        )
    return LAYOUTS[layout]
