# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention inside JAX programs: under jax.jit, differentiable in reverse mode, on CPU and GPU.

    import fulmen.jax
    o = fulmen.jax.attention(q, k, v, causal=True)

The call is one node of XLA's foreign function interface: libfulmen holds the handlers
(src/ffi/xla_handlers.cpp), nothing else is needed. Options are constants of the traced program;
arrays may be traced. Under jax.vmap the mapped calls run one after the other.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax

from . import masks
from ._library import announce_nvrtc, library, schema
from .array_types import dtype_name
from .errors import ArgumentError, DTypeError
from .keywords import JaxOptions, Placement, takes
from .options import Settings, check_keywords, philox, settings_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = Any


@lru_cache(maxsize=1)
def _registered() -> bool:
    """Tells XLA the handlers, once for the process."""
    handlers = ctypes.CDLL(library().path)
    for verb in ("forward", "backward"):
        for platform, ending in (("cpu", "cpu"), ("CUDA", "cuda")):
            handler = getattr(handlers, f"fulmen_xla_{verb}_{ending}")
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(f"fulmen_{verb}", capsule, platform=platform)
    if any(device.platform == "gpu" for device in jax.devices()):
        announce_nvrtc()
    return True


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
        o, or (o, lse); differentiable in q, k, v, bias and sinks.

    Raises:
        fulmen.Error: an option or a number of axes is wrong, while the program is traced. What only
            the run shows is an error of JAX with the same sentence.
    """
    _registered()
    check_keywords(options)
    for name in Placement.__annotations__:
        if name in options:
            raise TypeError(f"{name!r} is no keyword of fulmen.jax.attention: XLA decides it")
    values: dict[str, Any] = {**options}
    if values.get("mask") is not None:
        values.update({"mask": None, **masks.split(values["mask"])})
    dropout_p, rng = values.get("dropout_p") or 0.0, values.pop("rng", None)
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
    settings.layout.check_all(q, k, v)
    for x, name in ((k, "k"), (v, "v")):
        if x.dtype != q.dtype:
            raise DTypeError(f"{name} has dtype {x.dtype}; q has {q.dtype}: {name}.astype(q.dtype)")
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    smooth = {name: arrays.pop(name) for name in schema().differentiable_inputs if name in arrays}
    call = _Call(settings, None if out_dtype is None else dtype_name(out_dtype))
    o, lse = _attend(call, smooth, arrays)
    return (o, lse) if return_lse else o


def _philox(rng: Any) -> Array:
    """Seed and offset as uint32[4], low words first: JAX has no int64 unless it is asked to."""
    if isinstance(rng, tuple):
        seed, offset = philox(rng, 1.0)
        return np.array([seed, offset], np.uint64).view(np.uint32)
    return jnp.concatenate([jax.random.bits(rng, (2,), jnp.uint32), jnp.zeros(2, jnp.uint32)])


class _Call(NamedTuple):
    """What is constant in a traced call."""

    settings: Settings
    out_dtype: str | None

    def run(self, verb: str, given: dict[str, Array], made: dict[str, Any]) -> dict[str, Array]:
        """Arrays of a call by name -> its results by name."""
        names = schema().array_names
        settings = self.settings
        found = jax.ffi.ffi_call(f"fulmen_{verb}", tuple(made.values()), vmap_method="sequential")(
            *given.values(),
            options=np.array(settings.words, np.int64),
            layout=np.array([settings.layout.code], np.int64),
            arrays=np.array([names.index(name) for name in (*given, *made)], np.int64),
        )
        return dict(zip(made, found))

    def forward(self, smooth: Any, fixed: Any, sums: str) -> dict[str, Array]:
        q, v = smooth["q"], smooth["v"]
        dtype = q.dtype if self.out_dtype is None else jnp.dtype(self.out_dtype)
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        rows = self.settings.layout.lse_shape(q.shape)
        made = {
            "o": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), dtype),
            "lse": jax.ShapeDtypeStruct(rows, wide),
        }
        if sums == "stats":
            made["stats"] = jax.ShapeDtypeStruct((*rows, 2), wide)
        return self.run("forward", {**smooth, **fixed}, made)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, smooth: dict[str, Array], fixed: dict[str, Array]) -> Any:
    found = call.forward(smooth, fixed, "lse")
    return found["o"], found["lse"]


def _attend_forward(call: _Call, smooth: Any, fixed: Any) -> Any:
    found = call.forward(smooth, fixed, "stats")
    return (found["o"], found["lse"]), (smooth, fixed, found["o"], found["stats"])


def _attend_backward(call: _Call, saved: Any, cotangents: Any) -> Any:
    smooth, fixed, o, stats = saved
    do, dlse = cotangents
    given = {**smooth, **fixed, "o": o, "stats": stats, "do": do, "dlse": dlse}
    made = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in smooth.items()}
    found = call.run("backward", given, made)
    return {name: found[f"d{name}"] for name in smooth}, None


_attend.defvjp(_attend_forward, _attend_backward)
