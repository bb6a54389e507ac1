# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits for caches, and Hadamard's rotation, inside JAX programs: nodes of XLA."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

import jax

from ._jax_targets import numbers, scale_array, targets
from .layouts import LAYOUTS, Layout, layout_of
from .quantising import (
    How,
    Quantised,
    check_dtype,
    dtypes_of_values,
    how_of,
    rotation_of,
    shape_of_scale,
)

Array = Any
_GIVEN = ("x", "scale", "constant", "lengths")  # rows 3 to 6 of kQuantiseRows, src/ffi


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
) -> Quantised:
    """`fulmen.quantise` on JAX arrays, which may be traced. It has no derivatives.

    Args:
        x, dtype, per, rotate, constant, scale, headroom, lengths, layout: as there.

    Returns:
        Quantised(values, scale, constant), as there.

    Raises:
        fulmen.Error: a number of axes or an argument is wrong, while the program is traced. What
            only the run shows is an error of JAX with the same sentence.
    """
    how, axes = how_of(dtype, per, rotate, constant, scale, headroom), layout_of(layout)
    check_dtype(how.dtype, dtypes_of_values())
    given = {"x": numbers("x", x)}
    axes.check(given["x"], "x")
    if scale is not None:
        given["scale"] = scale_array(scale)
    if constant is not None and not how.find_constant:
        given["constant"] = numbers("constant", constant)
    if lengths is not None:
        given["lengths"] = numbers("lengths", lengths)
    arrays = {name: jax.lax.stop_gradient(y) for name, y in given.items()}
    values, *found = _quantising(tuple(arrays), how, axes.name)(*arrays.values())
    scale = found.pop(0) if how.find_scale else given["scale"]
    return Quantised(values, scale, found[0] if how.find_constant else given.get("constant"))


@lru_cache(maxsize=256)
def _quantising(names: tuple[str, ...], how: How, layout: str) -> Any:
    """A function of the arrays with these names."""
    axes = LAYOUTS[layout]
    written = (0, *((1,) if how.find_scale else ()), *((2,) if how.find_constant else ()))
    rows = (*(3 + _GIVEN.index(name) for name in names), *written)
    words = {"quantisation": how.words, "layout": (axes.code,), "arrays": rows}
    attributes = {name: np.array(x, np.int64) for name, x in words.items()}

    def run(*arrays: Array) -> Any:
        shape = arrays[0].shape
        types = [jax.ShapeDtypeStruct(shape, jnp.dtype(how.dtype))]
        for is_found, per in ((how.find_scale, how.per), (how.find_constant, "channel")):
            if is_found:
                types.append(jax.ShapeDtypeStruct(shape_of_scale(shape, per, axes), jnp.float32))
        function = jax.ffi.ffi_call(targets()["quantise"], tuple(types))
        return tuple(function(*arrays, **attributes))

    return jax.jit(sequential_vmap(run))


def hadamard(x: Array, *, constant: Any = None, layout: str = "bhsd") -> Array:
    """`fulmen.hadamard` on JAX arrays, which may be traced; differentiable in x in reverse mode.

    Args:
        x, constant, layout: as there.

    Returns:
        A new array.

    Raises:
        fulmen.Error: as `quantise`.
    """
    axes, x = layout_of(layout), numbers("x", x)
    axes.check(x, "x")
    if constant is None:
        return _rotate(axes, x)
    constant = jax.lax.stop_gradient(numbers("constant", constant))
    return _rotate_less(axes, x, constant)


def _rotated(axes: Layout, x: Array, *constant: Array) -> Array:
    names = ("x", "constant") if constant else ("x",)
    return _quantising(names, rotation_of(x.dtype), axes.name)(x, *constant)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(axes: Layout, x: Array) -> Array:
    return _rotated(axes, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_less(axes: Layout, x: Array, constant: Array) -> Array:
    return _rotated(axes, x, constant)


_rotate.defvjp(
    lambda axes, x: (_rotate(axes, x), None),
    lambda axes, _, gradient: (_rotate(axes, gradient),),
)
_rotate_less.defvjp(
    lambda axes, x, constant: (_rotate_less(axes, x, constant), None),
    lambda axes, _, gradient: (_rotate(axes, gradient), None),
)
