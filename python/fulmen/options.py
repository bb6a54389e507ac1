# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The options of a call: defaults, checks, and the order in which the library reads them.

`prepare` is the one place where a keyword of the public functions becomes a number or an array of
fulmen.h. What depends on values alone is computed once per combination and remembered.
"""

from __future__ import annotations

import math
import operator
import sys
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, TypedDict

import numpy as np

from ._library import Where
from ._nvrtc import announce
from .arrays import torch_checked
from .errors import ArgumentError, DTypeError, Error, ShapeError
from .kinds import HOST, NO_STREAM, Array, NumpyKind, kind_of
from .masks import Chunks, Documents, Prefix


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


class Layout(NamedTuple):
    """The axes of q, k, v, o and their gradients, in order."""

    name: str
    rank: int
    rows_before_heads: int

    def lse_shape(self, q_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of lse: (batch, head, row) without the axes that the layout leaves out."""
        if self.rows_before_heads:
            return (*q_shape[:-3], q_shape[-2], q_shape[-3])
        return tuple(q_shape[:-1])

    def check(self, x: Array, name: str) -> tuple[int, ...]:
        """The shape of x, which must have the axes of the layout."""
        try:
            shape: tuple[int, ...] = x.shape
        except AttributeError:
            raise DTypeError(
                f"{name} is {type(x).__name__}, not an array (NumPy, PyTorch, JAX: anything with "
                "DLPack)"
            ) from None
        if len(shape) != self.rank:
            others = [other.name for other in LAYOUTS.values() if other.rank == len(shape)]
            nearest = f": layout={' or '.join(map(repr, others))} has that many" if others else ""
            raise ShapeError(
                f"{name} has {len(shape)} axes {tuple(shape)}; layout={self.name!r} names "
                f"{self.rank}{nearest}"
            )
        return shape


LAYOUTS = {
    "bhsd": Layout("bhsd", 4, 0),
    "bshd": Layout("bshd", 4, 1),
    "hsd": Layout("hsd", 3, 0),
    "shd": Layout("shd", 3, 1),
    "sd": Layout("sd", 2, 0),
}
ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
BACKENDS = {"auto": 0, "cpu": 1, "cuda": 2}
CPU_IMPLEMENTATIONS = ("scalar", "tiled")
GPU_IMPLEMENTATIONS = ("naive", "simt", "sm80", "sm90")
PRECISIONS = {"float32": 0, "tf32": 1, "3xtf32": 2}
IMPLEMENTATIONS = {
    name: number for number, name in enumerate(("auto", *CPU_IMPLEMENTATIONS, *GPU_IMPLEMENTATIONS))
}


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
    on_gpu = False
    if type(q) is np.ndarray and stream is None:
        where = _ON_CPU
    else:
        kind, on_gpu = _kind_and_place(q)
        where = kind.stream(q, stream), kind
    if mask is None:
        prefix, chunk, visible, q_ids, kv_ids = _NO_MASK
    else:
        prefix, chunk, visible, q_ids, kv_ids = split_mask(mask)
    rng_array = None
    if rng is not None and type(rng) is not tuple:
        rng, rng_array = _rng_array(rng, on_gpu)
    key = (
        scale, softcap, causal, alignment, window, prefix, chunk, dropout_p, rng, max_q, max_kv,
        deterministic, batch_invariant, backend, implementation, layout, cu_q is not None,
        precision,
    )  # fmt: skip
    try:
        numbers, axes = _settled(*key)
    except Error:
        raise
    except TypeError:  # a list among them cannot be remembered
        numbers, axes = _settled.__wrapped__(*key)
    has_lengths = not (q_lengths is None and kv_lengths is None)
    if has_lengths or cu_q is not None or cu_kv is not None or mask is not None:
        counts = (q_lengths, kv_lengths, cu_q, cu_kv, q_ids, kv_ids)
        q_lengths, kv_lengths, cu_q, cu_kv, q_ids, kv_ids = (_beside(q, x, on_gpu) for x in counts)
    try:
        fits = len(q.shape) == len(k.shape) == len(v.shape) == axes.rank
    except AttributeError:
        fits = False
    if not fits:
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            axes.check(x, name)
    inputs: tuple[Array, ...] = (
        q, k, v, bias, visible, alibi_slopes, sinks, q_lengths, kv_lengths, cu_q, cu_kv, q_ids,
        kv_ids, rng_array,
    )  # fmt: skip
    if "torch" in sys.modules:
        inputs = torch_checked(inputs)
    return numbers, axes, inputs, where


def _kind_and_place(q: Array) -> tuple[type[NumpyKind], bool]:
    """The kind of q, and whether it is on a GPU: then NVRTC may be needed from now on."""
    if not hasattr(q, "shape"):
        return NumpyKind, False  # refused with the other arrays
    kind = kind_of(q, "q")
    if kind.device(q) == HOST:
        return kind, False
    announce()
    return kind, True


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
            prefix = _int64("prefix", part.n)
        elif isinstance(part, Chunks):
            chunk = _int64("chunks", part.size)
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


@lru_cache(maxsize=1024)
def _settled(
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
        *_rng(rng, p),
        _int64("max_q", 0 if max_q is None else max_q),
        _int64("max_kv", 0 if max_kv is None else max_kv),
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


def _int64(name: str, value: Any) -> int:
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
        left, right = (-1 if side is None else _int64("window", side) for side in window)
        return left, right
    if isinstance(window, bool):
        raise DTypeError(f"window is {window}; None, an integer or (left, right) is expected")
    width = _int64("window", window)
    return width, (0 if causal and width >= 0 else width)


def _rng(rng: Any, dropout_p: float) -> tuple[int, int]:
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
