# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits for caches: keys less a constant, rotated, divided by scales.

The steps that `precision="fp8"` takes of 16-bit arrays, as functions of their own (Ashkboos et al.,
QuaRot, 2024; Zhang et al., SageAttention, 2024).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from ._calls import run
from ._library import library, schema
from .array_types import (
    Array,
    array_type_of,
    dtype_name,
    in_memory,
    is_torch,
    scales,
    torch_call,
)
from .errors import ArgumentError, DTypeError, flag, one_of, shown
from .layouts import Layout, layout_of

NAMES = ("values", "scale", "constant", "x", "scale", "constant", "lengths")
GROUPS = ("tensor", "head", "row", "channel")


class Quantised(NamedTuple):
    """What `quantise` returns.

    Attributes:
        values: as x, in the dtype of 8 bits.
        scale: what values are multiplied by: `k_scale` and `v_scale` of `attention`.
        constant: what was taken off x before; None: nothing.
    """

    values: Array
    scale: Array
    constant: Array


class How(NamedTuple):
    """A call of the library, but for its arrays.

    Attributes:
        dtype: the name of that of values.
        per: of the groups of scales.
        rotate, find_constant, find_scale: as there.
        headroom: of scales.
    """

    dtype: str
    per: str
    rotate: bool
    find_constant: bool
    find_scale: bool
    headroom: float

    @property
    def words(self) -> tuple[int, ...]:
        """As the library reads it."""
        bits: int = struct.unpack("q", struct.pack("d", self.headroom))[0]
        return int(self.rotate), bits


def quantise(
    x: Array,
    dtype: Any = "float8_e4m3fn",
    *,
    per: str = "head",
    rotate: bool = False,
    constant: Any = None,
    scale: Any = None,
    headroom: float = 1.0,
    lengths: Any = None,
    layout: str = "bhsd",
    stream: Any = None,
) -> Quantised:
    """Numbers of 8 bits of x: values = R (x - constant) / scale, rounded to the nearest.

    Keys less a constant, rotated as their queries are (`hadamard`), give scores that differ by one
    number a row from those of the keys, so o is the same where neither softcap nor sinks stand
    beside them, and what single dims have of size no longer coarsens the others. lse is larger by
    scale * dot(q, constant), where scale is that of `attention`.

    Args:
        x: (batch, head, row, dim) in the order that `layout` names, dim 1 to 512: float32, float16
            or bfloat16.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        per: what has a scale of its own where `scale` is None: "tensor", all of x; "head", each
            head of a batch entry; "row"; "channel", each dim of a head, of values alone.
        rotate: whether R is Hadamard's matrix over the square root of its size, on each part of a
            row of the largest power of two that divides dim. Of keys, never of values.
        constant: what is taken off: None; "mean", of each head and dim that of up to 256 of its
            rows, or 0 where that is less than half of their size; or float32 that broadcasts to x
            with one row, such as the constant of the rows that the cache has already.
        scale: None: found, for each group headroom times its largest number over the largest of
            dtype. Or a number, or float32 that broadcasts to x with a row or a dim of 1: that of
            the rows that the cache has already. What is beyond the largest number becomes that.
        headroom: 1 or more: rows that come later may be so much larger. With float8_e4m3fn 8 costs
            nothing but below 1/900 of the largest number.
        lengths: (batch,) rows that count, int32 or int64; values of the others are 0.
        layout: the axes of x, in order, as in `attention`.
        stream: as in `attention`.

    Returns:
        Quantised(values, scale, constant): scale and constant as given, or as found: with the axes
        of x and an extent of 1 where they are shared.

    Raises:
        fulmen.Error: as `attention`; on the CPU ArgumentError for a length that is out of range. On
            a GPU such an entry counts as empty, and `fulmen.device_faults` tells. Tensors that
            require grad are refused: values have no derivatives.

    >>> import numpy as np, fulmen
    >>> k = np.array([[100.0, 1.0], [100.0, -1.0]], np.float32)[None, None]
    >>> made = fulmen.quantise(k, constant="mean")
    >>> made.constant.tolist(), made.scale.tolist() == [[[[np.float32(1 / 448)]]]]
    ([[[[100.0, 0.0]]]], True)
    >>> made.values.astype(np.float32)[0, 0].tolist()
    [[0.0, 448.0], [0.0, -448.0]]
    """
    how = how_of(dtype, per, rotate, constant, scale, headroom)
    axes = layout_of(layout)
    if is_torch(x):
        return Quantised(*torch_call("quantise")(x, constant, scale, lengths, how, axes, stream))
    axes.check(x, "x")
    check_dtype(how.dtype, dtypes_of_values())
    return quantise_arrays(x, constant, scale, lengths, how, axes, stream)


def hadamard(x: Array, *, constant: Any = None, layout: str = "bhsd", stream: Any = None) -> Array:
    """Rows rotated by Hadamard's matrix, as `quantise` rotates them: R (x - constant).

    Queries beside rotated keys are rotated too: dot(R q, R k) = dot(q, k). It undoes itself.
    Differentiable in x with PyTorch tensors; in JAX programs `fulmen.jax.hadamard` is.

    Args:
        x: as in `quantise`.
        constant: float32 that broadcasts to x with one row: what is taken off before, of keys.
        layout: the axes of x, in order, as in `attention`.
        stream: as in `attention`.

    Returns:
        A new array of the dtype of x: computed in float32, rounded once.

    Raises:
        fulmen.Error: as `attention`.

    >>> import numpy as np, fulmen
    >>> fulmen.hadamard(np.array([[8.0, 0.0, 0.0, 0.0]], np.float32), layout="sd")
    array([[4., 4., 4., 4.]], dtype=float32)
    """
    axes = layout_of(layout)
    if is_torch(x):
        rotated: Array = torch_call("hadamard")(x, constant, axes, stream)
        return rotated
    axes.check(x, "x")
    how = rotation_of(array_type_of(x, "x").dtype(x))
    return quantise_arrays(x, constant, None, None, how, axes, stream).values


def how_of(dtype: Any, per: str, rotate: bool, constant: Any, scale: Any, headroom: Any) -> How:
    """The call that the arguments of `quantise` mean.

    Raises:
        ArgumentError, DTypeError: one of them is none.
    """
    if isinstance(constant, str) and constant != "mean":
        raise ArgumentError(f"constant is {shown(constant)}; allowed are None, 'mean', an array")
    if isinstance(scale, str):
        raise ArgumentError(f"scale is {shown(scale)}; allowed are None, a number, an array")
    if isinstance(headroom, bool) or not isinstance(headroom, Real):
        raise DTypeError(f"headroom is {shown(headroom)}; a number from 1 on is expected")
    finds = isinstance(constant, str)
    per = one_of("per", per, GROUPS)
    return How(
        dtype_name(dtype), per, bool(flag("rotate", rotate)), finds, scale is None, float(headroom)
    )


def dtypes_of_values() -> tuple[str, ...]:
    """The names of the dtypes of 8 bits; bytes are those of records."""
    return tuple(name for name in schema().quantised if name != "uint8")


def check_dtype(name: str, allowed: Sequence[str]) -> None:
    """Refuses a dtype that has no 8 bits."""
    if name not in allowed:
        raise DTypeError(f"dtype is {shown(name)}; allowed are {', '.join(allowed)}")


def rotation_of(dtype: Any) -> How:
    """The call that `hadamard` is."""
    return How(dtype_name(dtype), "head", True, False, False, 1.0)


def shape_of_scale(shape: tuple[Any, ...], per: str, axes: Layout) -> tuple[Any, ...]:
    """Of scales that are found: the axes of x, with an extent of 1 where they are shared."""
    row = len(shape) - (3 if axes.rows_before_heads else 2)
    last = len(shape) - 1
    shared = {"tensor": range(len(shape)), "head": (row, last), "row": (last,), "channel": (row,)}
    return tuple(1 if axis in shared[per] else n for axis, n in enumerate(shape))


def quantise_arrays(
    x: Array, constant: Any, scale: Any, lengths: Any, how: How, axes: Layout, stream: Any = None
) -> Quantised:
    """`quantise` of arrays of any type."""
    given = [None if scale is None else scales(scale, x), None if how.find_constant else constant]
    x, *given, lengths = in_memory((x, *given, lengths), NAMES[3:])
    array_type = array_type_of(x, "x")
    where = array_type.stream(x, stream), array_type
    found: list[Any] = [None, None]
    with array_type.on(where[0], x):
        float32 = array_type.dtype_named("float32")
        values = array_type.empty(x.shape, array_type.dtype_named(how.dtype), x)
        if how.find_scale:
            found[0] = array_type.empty(shape_of_scale(x.shape, how.per, axes), float32, x)
        if how.find_constant:
            found[1] = array_type.empty(shape_of_scale(x.shape, "channel", axes), float32, x)
    every = (values, *found, x, *given, lengths)
    made = run(library().quantise, how.words, where, axes.code, every, range(3), NAMES)
    values, scale, constant = (y if y is None else array_type.result(y, x) for y in made)
    return Quantised(
        values, scale if how.find_scale else given[0], constant if how.find_constant else given[1]
    )
