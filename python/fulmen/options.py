# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The options of a call: defaults, and the order in which the library reads them.

`prepare` is the one place where a keyword of the public functions becomes a number (settled.py) or
an array of fulmen.h.
"""

from __future__ import annotations

import sys
from typing import Any, TypedDict

import numpy as np

from ._library import Where
from ._nvrtc import announce
from .arrays import torch_checked
from .choices import Layout
from .errors import ArgumentError, DTypeError, Error
from .kinds import HOST, NO_STREAM, Array, NumpyKind, kind_of
from .masks import Chunks, Documents, Prefix
from .settled import integer, settled


class Options(TypedDict, total=False):
    """Keywords of the attention calls; `fulmen.attention` documents each."""

    scale: float | None
    causal: bool
    alignment: str
    window: int | tuple[int | None, int | None] | None
    mask: Any
    bias: Array
    alibi_slopes: Array
    softcap: float
    sinks: Array
    q_lengths: Array
    kv_lengths: Array
    max_q: int | None
    max_kv: int | None
    dropout_p: float
    rng: tuple[int, int] | Array | None
    layout: str
    backend: str
    implementation: str
    deterministic: bool
    batch_invariant: bool
    precision: str
    stream: Any


class CallOptions(Options, total=False):
    """The same, with the offsets of packed sequences."""

    cu_q: Array
    cu_kv: Array


# A call, as the library reads it: the fields of fulmen_problem from scale on, the axes, the arrays
# from q to rng of fulmen_tensors, and where it runs. A plain tuple: each call makes one.
Prepared = tuple[tuple[float, ...], Layout, tuple[Array, ...], Where]
_ON_CPU: Where = (NO_STREAM, NumpyKind)


def prepare(
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
    rng: tuple[int, int] | Array | None = None,
    layout: str = "bhsd",
    backend: str = "auto",
    implementation: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str = "float32",
    stream: Any = None,
) -> Prepared:
    """From the keywords of a call to what the library reads.

    Args:
        q, k, v: arrays.

    Raises:
        Error: an option is not one that is allowed.
    """
    where, on_gpu = _ON_CPU, False
    if type(q) is not np.ndarray or stream is not None:
        where, on_gpu = _where(q, stream)
    prefix, chunk, visible, q_ids, kv_ids = _NO_MASK if mask is None else split_mask(mask)
    rng_array = None
    if rng is not None and type(rng) is not tuple:
        rng, rng_array = _rng_array(rng, on_gpu)
    key = (
        scale, softcap, causal, alignment, window, prefix, chunk, dropout_p, rng, max_q, max_kv,
        deterministic, batch_invariant, backend, implementation, layout, cu_q is not None,
        precision,
    )  # fmt: skip
    try:
        numbers, axes = settled(*key)
    except Error:
        raise
    except TypeError:  # a list among them cannot be remembered
        numbers, axes = settled.__wrapped__(*key)
    counts: tuple[Array, ...] = (q_lengths, kv_lengths, cu_q, cu_kv, q_ids, kv_ids)
    if not (q_lengths is kv_lengths is cu_q is cu_kv is mask is None):
        counts = tuple([_beside(q, x, on_gpu) for x in counts])
    try:
        fits = len(q.shape) == len(k.shape) == len(v.shape) == axes.rank
    except AttributeError:
        fits = False
    if not fits:
        axes.check_all(q, k, v)
    inputs = (q, k, v, bias, visible, alibi_slopes, sinks, *counts, rng_array)
    if "torch" in sys.modules:
        inputs = torch_checked(inputs)
    return numbers, axes, inputs, where


def _where(q: Array, stream: Any) -> tuple[Where, bool]:
    """Stream and kind of q, and whether it is on a GPU: then NVRTC may be needed from now on."""
    if not hasattr(q, "shape"):
        return (NumpyKind.stream(q, stream), NumpyKind), False  # refused with the other arrays
    kind = kind_of(q, "q")
    on_gpu = kind.device(q) != HOST
    if on_gpu:
        announce()
    return (kind.stream(q, stream), kind), on_gpu


def _beside(q: Array, x: Any, on_gpu: bool) -> Array:
    """Integers as an array; those of a list go where q is, an array of the caller stays."""
    made = integers(x)
    return made if made is x or not on_gpu else kind_of(q, "q").moved(made, q)


def _rng_array(rng: Any, on_gpu: bool) -> tuple[Any, Array]:
    """What `rng=` says as two numbers, and the array that the library reads instead of them."""
    if tuple(getattr(rng, "shape", ())) != (2,) or not hasattr(rng, "__dlpack__"):
        return rng, None
    if on_gpu:
        return (0, 0), rng
    seed, offset = (int(number) for number in rng)
    return (seed % 2**64, offset), None


_NO_MASK = (0, 0, None, None, None)


def split_mask(mask: Any) -> tuple[int, int, Array, Array, Array]:
    """The parts of `mask=`: prefix, chunk, boolean array, q_ids, kv_ids; each at most once."""
    prefix, chunk, visible, q_ids, kv_ids = _NO_MASK
    seen: set[type] = set()
    for part in mask if isinstance(mask, (tuple, list)) else (mask,):
        kind = type(part) if isinstance(part, (Prefix, Chunks, Documents)) else np.ndarray
        if kind in seen:
            said = "boolean arrays; AND them first" if kind is np.ndarray else kind.__name__
            raise ArgumentError(f"mask holds two {said}: each kind may stand there once")
        seen.add(kind)
        if isinstance(part, Prefix):
            prefix = integer("prefix", part.n)
        elif isinstance(part, Chunks):
            chunk = integer("chunks", part.size)
            if chunk < 1:
                raise ArgumentError(f"masks.chunks has size {chunk}; at least 1 is allowed")
        elif isinstance(part, Documents):
            q_ids = part.q_ids
            kv_ids = q_ids if part.kv_ids is None else part.kv_ids
        elif hasattr(part, "__dlpack__"):
            visible = part
        else:
            raise DTypeError(
                f"mask holds {type(part).__name__}; allowed are a boolean array and the values of "
                "fulmen.masks"
            )
    return prefix, chunk, visible, q_ids, kv_ids


def integers(x: Any) -> Array:
    """An array of integers from an array or a list of Python's integers."""
    if not isinstance(x, (list, tuple)):
        return x
    made = np.asarray(x)
    return made if made.size else made.astype(np.int64)
