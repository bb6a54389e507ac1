# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention inside JAX programs: under jax.jit, differentiable in reverse mode, on CPU and GPU.

    import fulmen.jax
    o = fulmen.jax.attention(q, k, v, causal=True)

The call is one node of XLA's foreign function interface: libfulmen holds the handlers
(src/ffi/xla_handlers.cpp), nothing else is needed. Options are constants of the traced program;
arrays may be traced. Under jax.vmap the mapped calls run one after the other. Arrays that are
sharded by batch or by heads stay so (_jax_sharding), and inside of jax.shard_map each device
computes its part. A program of jax.export runs with a library that has the same options and arrays;
another one does not know the names of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

import jax

from . import expressions, masks
from ._calls import result_dtype
from ._jax_appending import append_kv, rotary
from ._jax_quantising import hadamard, quantise
from ._jax_sharding import Split, split_over_devices
from ._jax_targets import scale_array, targets
from ._library import expression_number, schema
from .array_types import NumpyType
from .errors import ArgumentError, DTypeError, UnsupportedError, shown
from .keywords import JaxOptions, JaxPagedOptions, Placement, takes
from .options import Settings, check_keywords, philox, settings_of
from .page_tables import cache_keywords, check_dim_v, latent_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "append_kv",
    "attention",
    "attention_mla",
    "attention_paged",
    "hadamard",
    "quantise",
    "rotary",
]

Array = Any

# With one of these, or an expression, a call is not split over devices.
WHOLE = ("rng", "page_table", "blocks")


@takes(JaxOptions)
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out_dtype: Any = None,
    **options: Unpack[JaxOptions],
) -> Any:
    """`fulmen.attention` on JAX arrays; with cu_q and cu_kv `fulmen.attention_varlen`.

    Args:
        q, k, v and options: as there.
        rng: (seed, offset), or a key of jax.random, which may be traced: fresh draws in each step.

    Returns:
        o, or (o, lse); differentiable in q, k, v, bias, sinks and the floating-point arrays that
        `score` reads.

    Raises:
        fulmen.Error: an option or a number of axes is wrong, while the program is traced. What only
            the run shows is an error of JAX with the same sentence.
    """
    return _traced(q, k, v, None, return_lse, out_dtype, options)


def _traced(
    q: Array,
    k: Array,
    v: Array | None,
    dim_v: int | None,
    return_lse: bool,
    out_dtype: Any,
    options: Mapping[str, Any],
) -> Any:
    """A call as a node of XLA; with dim_v v is the first dims of k and not an array of its own."""
    check_keywords(options)
    for name in Placement.__annotations__:
        if name in options:
            raise TypeError(f"{name!r} is no keyword of fulmen.jax.attention: XLA decides it")
    values: dict[str, Any] = {**options}
    if values.get("mask") is not None:
        values.update({"mask": None, **masks.split(values["mask"])})
    texts = values.pop("score", None), values.pop("expressions", ())
    values.update(expressions.resolved(*texts, expression_number))
    given_p, rng = values.get("dropout_p"), values.pop("rng", None)
    dropout_p = float(given_p) if isinstance(given_p, Real) else 0.0  # or refused by settings_of
    if dropout_p > 0:
        if rng is None:
            raise ArgumentError(
                f"dropout_p is {dropout_p} and rng is missing: a key or (seed, offset)"
            )
        values["rng"] = (0, 0)  # the array has them
    inputs = {name: values.pop(name, None) for name in schema().optional_inputs if name != "rng"}
    given = {"q": q, "k": k, "v": v, **inputs, "rng": _philox(rng) if dropout_p > 0 else None}
    values = {x: tuple(y) if isinstance(y, list) else y for x, y in values.items()}
    settings = settings_of(tuple(values.items()), inputs["cu_q"] is not None)
    settings.layout.check_all(q, k, k if v is None else v, inputs["page_table"])
    for x, name in ((k, "k"), (k if v is None else v, "v")):
        if x.dtype != q.dtype and x.dtype.name not in schema().quantised:
            raise DTypeError(f"{name} has dtype {x.dtype}; q has {q.dtype}: {name}.astype(q.dtype)")
    arrays = {name: _array(name, x) for name, x in given.items() if x is not None}
    arrays = _varying_alike(arrays)
    smooth = {
        name: arrays.pop(name)
        for name in schema().differentiable_inputs
        if name in arrays and jnp.issubdtype(arrays[name].dtype, jnp.floating)
    }
    call = _Call(settings, np.dtype(result_dtype(NumpyType, q.dtype, out_dtype)).name, dim_v)
    o, lse = _attend(call, smooth, arrays)
    return (o, lse) if return_lse else o


@takes(JaxPagedOptions)
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Any,
    kv_lengths: Array,
    *,
    cu_q: Array = None,
    positions: Array = None,
    batch_index: Array = None,
    kv_start: Array = None,
    kv_shared: Array = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    **options: Unpack[JaxPagedOptions],
) -> Any:
    """`fulmen.attention_paged` on JAX arrays, which may be traced.

    Args:
        q, k_pages, v_pages, page_table, kv_lengths, cu_q, positions, batch_index, kv_start,
            kv_shared: as there; so are the options. The words of masks.tree are NumPy's, or uint32
            with one more axis of two, low words first.
        return_lse, out_dtype: as in `fulmen.jax.attention`.

    Returns:
        o, or (o, lse).

    Raises:
        fulmen.Error: as `fulmen.jax.attention`; UnsupportedError where a gradient is asked for.
    """
    caches = cache_keywords(
        page_table, kv_lengths, cu_q, positions, batch_index, kv_start, kv_shared
    )
    results = {"return_lse": return_lse, "out_dtype": out_dtype}
    return attention(q, k_pages, v_pages, **caches, **results, **options)


@takes(JaxPagedOptions)
def attention_mla(
    q: Array,
    kv: Array,
    page_table: Any = None,
    kv_lengths: Array = None,
    *,
    dim_v: int = 512,
    cu_q: Array = None,
    batch_index: Array = None,
    kv_start: Array = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    **options: Unpack[JaxPagedOptions],
) -> Any:
    """`fulmen.attention_mla` on JAX arrays, which may be traced: no slice of the cache is made.

    Args:
        q, kv, page_table, kv_lengths, dim_v, cu_q, batch_index, kv_start, options: as there.
        return_lse, out_dtype: as in `fulmen.jax.attention`.

    Returns:
        o, or (o, lse); without pages differentiable in q and kv.

    Raises:
        fulmen.Error: as `fulmen.jax.attention_paged`.
    """
    check_dim_v(kv.shape[-1], dim_v)
    caches = latent_keywords(page_table, kv_lengths, cu_q, batch_index, kv_start)
    return _traced(q, kv, None, dim_v, return_lse, out_dtype, {**caches, **options})


def _array(name: str, x: Any) -> Array:
    if name == "tree":
        return _words(x)
    try:
        if name in schema().scales:
            return scale_array(x)
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise DTypeError(f"{name} is {shown(x)}; an array of numbers is expected") from None


def _words(x: Any) -> Array:
    """64-bit words as uint32 with one more axis of two, low words first: as _philox has them."""
    if isinstance(x, np.ndarray) and x.dtype == np.int64:
        return jnp.asarray(np.ascontiguousarray(x)[..., None].view(np.uint32))
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    if dtype == jnp.uint32 and shape[-1:] == (2,):
        return x
    if dtype == jnp.int64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    raise DTypeError(
        f"the words of masks.tree are {shown(x)}; int64 of NumPy is expected, or uint32 of shape "
        "(..., 2), low words first"
    )


def _philox(rng: Any) -> Array:
    """Seed and offset as uint32[4], low words first: JAX has no int64 unless it is asked to."""
    if isinstance(rng, tuple):
        seed, offset = philox(rng, 1.0)
        return np.array([seed, offset], np.uint64).view(np.uint32)
    return jnp.concatenate([jax.random.bits(rng, (2,), jnp.uint32), jnp.zeros(2, jnp.uint32)])


def _varying(*arrays: Any) -> frozenset[str]:
    """The axes of jax.shard_map over which one of the arrays differs from device to device."""
    typeof = getattr(jax, "typeof", None)
    if typeof is None:  # a JAX that does not ask
        return frozenset()
    types = [typeof(x) for x in arrays]
    axes = (getattr(x, "manual_axis_type", None) or getattr(x, "mat", x) for x in types)
    none: frozenset[str] = frozenset()
    return none.union(*(getattr(x, "varying", getattr(x, "vma", none)) for x in axes))


def _type(shape: tuple[int, ...], dtype: Any, varying: frozenset[str]) -> Any:
    """The type of a result that differs over these axes."""
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    if hasattr(jax.sharding, "ManualAxisType"):
        how = jax.sharding.ManualAxisType(varying=varying)
        where = jax.sharding.NamedSharding(
            jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec()
        )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where, manual_axis_type=how)
    return jax.ShapeDtypeStruct(shape, dtype, vma=varying)  # JAX 0.6 to 0.9


def _varying_alike(arrays: dict[str, Array]) -> dict[str, Array]:
    """Arrays that differ over the same axes, as inputs of one call must: gradients of what did not
    differ are then summed over these axes.
    """
    every = _varying(*arrays.values())

    def alike(x: Array) -> Array:
        missing = tuple(sorted(every - _varying(x)))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)

    return {name: alike(x) for name, x in arrays.items()}


@lru_cache(maxsize=1024)
def _operation(
    settings: Settings,
    dim_v: int | None,
    verb: str,
    given: tuple[Named, ...],
    made: tuple[Named, ...],
) -> Any:
    """A function of arrays with these names, shapes and dtypes that makes those of `made`."""
    names = schema().array_names
    attributes = {
        "options": np.array(settings.words, np.int64),
        "layout": np.array([settings.layout.code], np.int64),
        "arrays": np.array([names.index(x.name) for x in (*given, *made)], np.int64),
    }
    if dim_v is not None:
        attributes["dim_v"] = np.array([dim_v], np.int64)

    def call(results: Sequence[Any]) -> Callable[..., Any]:
        def on(*arrays: Any) -> Any:
            varying = _varying(*arrays)
            types = tuple(_type(x.shape, x.dtype, varying) for x in results)
            return tuple(jax.ffi.ffi_call(targets()[verb], types)(*arrays, **attributes))

        return on

    shapes, of_results = ({x.name: x.shape for x in arrays} for arrays in (given, made))
    is_whole = not shapes.keys().isdisjoint(WHOLE) or settings.fields().expression != 0
    split = Split.of(shapes, of_results, settings.layout, is_whole)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made]
    return jax.jit(sequential_vmap(split_over_devices(call, split, types)))


class Named(NamedTuple):
    """An array of a call, without its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class _Call(NamedTuple):
    """What is constant in a traced call."""

    settings: Settings
    out_dtype: str
    dim_v: int | None  # of a v that is the first dims of k

    def run(self, verb: str, given: dict[str, Array], made: dict[str, Any]) -> dict[str, Array]:
        """Arrays of a call by name -> its results by name."""
        types = [
            tuple(Named(name, tuple(x.shape), str(x.dtype)) for name, x in arrays.items())
            for arrays in (given, made)
        ]
        dim_v = None if "v" in given else self.dim_v
        found = _operation(self.settings, dim_v, verb, *types)(*given.values())
        return dict(zip(made, found))

    def forward(self, smooth: Any, fixed: Any, sums: str) -> dict[str, Array]:
        arrays = {**smooth, **fixed}
        q = arrays["q"]
        dim_v = arrays["v"].shape[-1] if self.dim_v is None else self.dim_v
        dtype = jnp.dtype(self.out_dtype)
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        rows = self.settings.layout.lse_shape(q.shape)
        made = {
            "o": jax.ShapeDtypeStruct((*q.shape[:-1], dim_v), dtype),
            "lse": jax.ShapeDtypeStruct(rows, wide),
        }
        if sums == "stats":
            made["stats"] = jax.ShapeDtypeStruct((*rows, 2), wide)
        return self.run("forward", arrays, made)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, smooth: dict[str, Array], fixed: dict[str, Array]) -> Any:
    found = call.forward(smooth, fixed, "lse")
    return found["o"], found["lse"]


def _attend_forward(call: _Call, smooth: Any, fixed: Any) -> Any:
    said = next((f"{name} is given" for name in schema().forward_only if name in fixed), None)
    k = {**smooth, **fixed}["k"]
    if k.dtype.name in schema().quantised:
        said = f"k has dtype {k.dtype}"
    if said is not None:
        raise UnsupportedError(
            f"{said} and a gradient is asked for: such calls have no backward pass; "
            "jax.lax.stop_gradient on q, k, v, bias and sinks leaves it out"
        )
    found = call.forward(smooth, fixed, "stats")
    return (found["o"], found["lse"]), (smooth, fixed, found["o"], found["stats"])


def _attend_backward(call: _Call, saved: Any, cotangents: Any) -> Any:
    smooth, fixed, o, stats = saved
    do, dlse = cotangents
    apart = dict(smooth)
    if call.dim_v is not None:
        apart["v"] = smooth["k"][..., : call.dim_v]
    given = {**apart, **fixed, "o": o, "stats": stats, "do": do, "dlse": dlse}
    made = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in apart.items()}
    found = call.run("backward", given, made)
    if call.dim_v is not None:
        found["dk"] = found["dk"].at[..., : call.dim_v].add(found["dv"])
    return {name: found[f"d{name}"] for name in smooth}, None


_attend.defvjp(_attend_forward, _attend_backward)
