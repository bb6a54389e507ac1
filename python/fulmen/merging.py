# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention over disjoint keys, merged: with o_p and lse_p of each part,

lse = log(sum over p of exp(lse_p))        o = sum over p of exp(lse_p - lse) o_p
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._calls import result_dtype, run
from ._library import library
from .array_types import (
    Array,
    array_type_of,
    dtype_name,
    in_memory,
    is_torch,
    torch_call,
)
from .errors import ArgumentError, DTypeError, kind_of, shown
from .layouts import layout_of


def merge(
    parts: Any,
    *,
    sinks: Array = None,
    layout: str = "bhsd",
    out_dtype: Any = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """The attention over the union of disjoint keys, from the attention over each part.

    Exact, in any order of parts; a part that saw nothing (lse = -inf) changes nothing.

    Args:
        parts: [(o, lse), ...] as `attention(..., return_lse=True)` returns them, without sinks;
            on a GPU at most 32.
        sinks: (head,); they enter once, here.
        layout: of o, as in `attention`.
        out_dtype: dtype of the merged o: that of the first part (None), or float32.
        stream: as in `attention`.

    Returns:
        (o, lse), new arrays.

    Raises:
        fulmen.Error: as `attention`.

    >>> import numpy as np, fulmen
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 6, 8))
    >>> left = fulmen.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True)
    >>> right = fulmen.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
    >>> o, lse = fulmen.merge([left, right])
    >>> bool(np.allclose(o, fulmen.attention(q, k, v)))
    True
    """
    try:
        parts = list(parts)
    except Exception:  # no list, or an iterator that fails
        raise DTypeError(f"parts is {shown(parts)}; pairs (o, lse) are expected") from None
    if not parts:
        raise ArgumentError("parts is empty; at least one pair (o, lse) is expected")
    for index, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) < 2:
            raise ArgumentError(f"parts[{index}] is no pair (o, lse), but {kind_of(part)}")
        for name, x in zip(("o", "lse"), part):
            if not hasattr(x, "shape"):
                raise DTypeError(f"{name} of parts[{index}] is {shown(x)}; an array is expected")
    parts = [tuple(part)[:2] for part in parts]
    if is_torch(parts[0][0]):
        merged: tuple[Array, Array] = torch_call("merge")(
            parts, sinks=sinks, layout=layout, out_dtype=out_dtype
        )
        return merged
    return merge_arrays(parts, sinks, layout, out_dtype, stream)


def merge_arrays(
    parts: Sequence[tuple[Array, Array]],
    sinks: Array,
    layout: str,
    out_dtype: Any,
    stream: Any = None,
) -> tuple[Array, Array]:
    """`merge` of arrays of any type, without gradients."""
    axes = layout_of(layout)
    arrays = tuple(x for part in parts for x in part)
    names = ["sinks", "o", "lse"]
    for index in range(len(parts)):
        names += [f"o of part {index}", f"lse of part {index}"]
    arrays = in_memory(arrays, names[3:])
    first, first_lse = parts[0]
    array_type = array_type_of(first, "o of a part")
    where = array_type.stream(first, stream), array_type
    shape = axes.check(first, "o of a part")
    own = array_type.dtype(first)
    dtype = own if out_dtype is None else result_dtype(array_type, own, out_dtype)
    with array_type.on(where[0], first):
        o = array_type.empty(shape, dtype, first)
        sums = array_type.dtype_named(dtype_name(first_lse.dtype))  # lse may be of another owner
        lse = array_type.empty(axes.lse_shape(shape), sums, first)
    every = (sinks, o, lse, *arrays)
    results = range(names.index("o"), names.index("lse") + 1)
    found = run(library().merge, (), where, axes.code, every, results, names)
    return array_type.result(found[0], first), array_type.result(found[1], first)
