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
import struct
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax

from ._library import ARRAY_NAMES, library
from ._nvrtc import announce
from .errors import ArgumentError, DTypeError
from .kinds import dtype_name
from .options import split_mask
from .settled import lots, settled

Array = Any
_GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


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
        announce()
    return True


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Array = None,
    alibi_slopes: Array = None,
    softcap: float = 0.0,
    sinks: Array = None,
    q_lengths: Array = None,
    kv_lengths: Array = None,
    cu_q: Array = None,
    cu_kv: Array = None,
    max_q: int | None = None,
    max_kv: int | None = None,
    dropout_p: float = 0.0,
    rng: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out_dtype: Any = None,
    implementation: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str = "float32",
) -> Any:
    """`fulmen.attention` on JAX arrays; with cu_q and cu_kv `fulmen.attention_varlen`.

    Args:
        q, k, v and options: as there.
        rng: (seed, offset), or a key of jax.random, which may be traced: fresh lots in each step.

    Returns:
        o, or (o, lse); differentiable in q, k, v, bias and sinks.

    Raises:
        fulmen.Error: an option or a number of axes is wrong, while the program is traced. What only
            the run shows is an error of JAX with the same sentence.
    """
    _registered()
    prefix, chunk, visible, q_ids, kv_ids = (
        (0, 0, None, None, None) if mask is None else split_mask(mask)
    )
    if dropout_p > 0 and rng is None:
        raise ArgumentError(f"dropout_p is {dropout_p} and rng is missing: a key or (seed, offset)")
    numbers, axes = settled(
        scale, softcap, causal, alignment, tuple(window) if isinstance(window, list) else window,
        prefix, chunk, dropout_p, None if dropout_p == 0 else (0, 0), max_q, max_kv, deterministic,
        batch_invariant, "auto", implementation, layout, cu_q is not None, precision,
    )  # fmt: skip
    axes.check_all(q, k, v)
    for x, name in ((k, "k"), (v, "v")):
        if x.dtype != q.dtype:
            raise DTypeError(f"{name} has dtype {x.dtype}; q has {q.dtype}: {name}.astype(q.dtype)")
    smooth = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    fixed = {
        "mask": visible, "alibi_slopes": alibi_slopes, "q_lengths": q_lengths,
        "kv_lengths": kv_lengths, "cu_q": cu_q, "cu_kv": cu_kv, "q_ids": q_ids,
        "kv_ids": q_ids if kv_ids is None else kv_ids,
        "rng": _words(rng) if dropout_p > 0 else None,
    }  # fmt: skip
    wanted = None if out_dtype is None else dtype_name(out_dtype)
    call = _Call(numbers, axes, wanted)
    o, lse = _attend(
        call,
        {name: jnp.asarray(x) for name, x in smooth.items() if x is not None},
        {name: jnp.asarray(x) for name, x in fixed.items() if x is not None},
    )
    return (o, lse) if return_lse else o


def _words(rng: Any) -> Array:
    """Seed and offset as uint32[4], low words first: JAX has no int64 unless it is asked to."""
    if isinstance(rng, tuple):
        seed, offset = lots(rng, 1.0)
        return np.array([seed % 2**64, offset], np.uint64).view(np.uint32)
    return jnp.concatenate([jax.random.bits(rng, (2,), jnp.uint32), jnp.zeros(2, jnp.uint32)])


class _Call:
    """What is constant in a traced call; equal where its values are."""

    def __init__(self, numbers: tuple[float, ...], axes: Any, out_dtype: str | None) -> None:
        self.axes, self.out_dtype = axes, out_dtype
        self.reals = sum(1 << i for i, x in enumerate(numbers) if isinstance(x, float))
        self.words = tuple(
            struct.unpack("q", struct.pack("d", x))[0] if isinstance(x, float) else int(x)
            for x in numbers
        )

    def _key(self) -> Any:
        return self.words, self.reals, self.axes, self.out_dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def run(self, verb: str, given: dict[str, Array], made: dict[str, Any]) -> dict[str, Array]:
        """Arrays of a call by name -> its results by name."""
        places = [ARRAY_NAMES.index(name) for name in (*given, *made)]
        found = jax.ffi.ffi_call(f"fulmen_{verb}", tuple(made.values()), vmap_method="sequential")(
            *given.values(),
            numbers=np.array(self.words, np.int64),
            form=np.array([self.reals, self.axes.rows_before_heads], np.int64),
            places=np.array(places, np.int64),
        )
        return dict(zip(made, found))

    def forward(self, smooth: Any, fixed: Any, sums: str) -> dict[str, Array]:
        q, v = smooth["q"], smooth["v"]
        dtype = q.dtype if self.out_dtype is None else jnp.dtype(self.out_dtype)
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        rows = self.axes.lse_shape(q.shape)
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
    made = {_GRADIENTS[name]: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in smooth.items()}
    found = call.run("backward", given, made)
    return {name: found[_GRADIENTS[name]] for name in smooth}, None


_attend.defvjp(_attend_forward, _attend_backward)
