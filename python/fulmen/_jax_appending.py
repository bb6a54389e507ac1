# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows into caches and rotary embeddings inside JAX programs: nodes of XLA, as attention is."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

import jax

from ._jax_targets import numbers, targets
from .appending import placement
from .errors import UnsupportedError, flag
from .layouts import layout_of
from .page_tables import AppendArrays

Array = Any


def append_kv(
    k_pages: Array,
    v_pages: Array,
    k_new: Array,
    v_new: Array,
    slots: Any,
    *,
    cu_new: Array = None,
    positions: Array = None,
    batch_index: Array = None,
    cos: Array = None,
    sin: Array = None,
    interleaved: bool = False,
    q: Array = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
) -> tuple[Array, ...]:
    """`fulmen.append_kv` on JAX arrays, which may be traced: returns the caches with the new rows.

    The caches that are passed are donated: their memory becomes that of the results, and they may
    not be used again. Inside of jax.jit XLA sees to that: donate them to the outermost function.

    Args:
        k_pages, v_pages, k_new, v_new, slots, cu_new, positions, batch_index: as there.
        cos, sin, interleaved, q, k_scale, v_scale, layout: as there.

    Returns:
        (k_pages, v_pages), or with q (k_pages, v_pages, q).

    Raises:
        fulmen.Error: a number of axes or an argument is wrong, while the program is traced. What
            only the run shows is an error of JAX with the same sentence.
    """
    named = placement(slots, batch_index, cu_new)
    named.update(positions=positions, cos=cos, sin=sin, q=q, k_scale=k_scale, v_scale=v_scale)
    axes = layout_of(layout, cu_new is not None)
    if v_pages is None:
        raise UnsupportedError(
            "v_pages is None; records of latent attention are written in place, by fulmen.append_kv"
        )
    given = AppendArrays(k_pages, v_pages, None, k_new, v_new, **named)
    arrays = {n: numbers(n, x) for n, x in zip(given._fields, given) if x is not None}
    for name in ("k_pages", "v_pages"):
        axes.of_pools.check(arrays[name], name)
    for name in ("k_new", "v_new", "q"):
        if name in arrays:
            axes.check(arrays[name], name)
    call = _appending(tuple(arrays), bool(flag("interleaved", interleaved)), axes.code)
    return tuple(call(*arrays.values()))


def _attributes(names: tuple[str, ...], interleaved: bool, layout: int) -> dict[str, Any]:
    members = [AppendArrays._fields.index(name) for name in names]
    numbers = {"interleaved": [int(interleaved)], "layout": [layout], "arrays": members}
    return {name: np.array(x, np.int64) for name, x in numbers.items()}


@lru_cache(maxsize=256)
def _appending(names: tuple[str, ...], interleaved: bool, layout: int) -> Any:
    """A function of the arrays with these names, the caches first, which it is given for good."""
    made = ("k_pages", "v_pages", *(("q_out",) if "q" in names else ()))
    attributes = _attributes((*names, *made), interleaved, layout)

    def append(*arrays: Array) -> Any:
        results = (*arrays[:2], *(arrays[names.index("q")] for _ in made[2:]))
        types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
        function = jax.ffi.ffi_call(
            targets()["append_kv"], types, input_output_aliases={0: 0, 1: 1}
        )
        return tuple(function(*arrays, **attributes))

    return jax.jit(sequential_vmap(append), donate_argnums=(0, 1))


def rotary(
    x: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    layout: str = "bhsd",
) -> Array:
    """`fulmen.rotary` on JAX arrays, which may be traced; differentiable in x in reverse mode.

    Args:
        x, positions, cos, sin, interleaved, layout: as there.

    Returns:
        A new array.

    Raises:
        fulmen.Error: as `append_kv`; UnsupportedError where a gradient of cos or sin is asked for.
    """
    axes = layout_of(layout)
    x, cos, sin = numbers("x", x), numbers("cos", cos), numbers("sin", sin)
    axes.check(x, "x")
    place = None if positions is None else numbers("positions", positions)
    return _rotate((bool(flag("interleaved", interleaved)), axes.code), x, place, cos, sin)


@lru_cache(maxsize=256)
def _rotation(has_positions: bool, interleaved: bool, layout: int) -> Any:
    names = ("q", *(("positions",) if has_positions else ()), "cos", "sin", "q_out")
    attributes = _attributes(names, interleaved, layout)

    def rotate(x: Array, *others: Array) -> Array:
        function = jax.ffi.ffi_call(targets()["rotary"], jax.ShapeDtypeStruct(x.shape, x.dtype))
        return function(x, *others, **attributes)

    return jax.jit(sequential_vmap(rotate))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(how: tuple[bool, int], x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    arrays = [y for y in (x, positions, cos, sin) if y is not None]
    return _rotation(positions is not None, *how)(*arrays)


def _rotate_forward(how: tuple[bool, int], x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    for table, name in ((cos, "cos"), (sin, "sin")):
        if table.perturbed:
            raise UnsupportedError(
                f"a gradient of {name} is asked for; rotary is differentiable in x alone: "
                f"jax.lax.stop_gradient({name}) leaves it out"
            )
    place = None if positions is None else positions.value
    return _rotate(how, x.value, place, cos.value, sin.value), (place, cos.value, sin.value)


def _rotate_backward(how: tuple[bool, int], saved: Any, gradient: Any) -> Any:
    positions, cos, sin = saved
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        gradient = jnp.zeros(gradient.shape, gradient.dtype)
    return _rotate(how, gradient, positions, cos, -sin), None, None, None


_rotate.defvjp(_rotate_forward, _rotate_backward, symbolic_zeros=True)
