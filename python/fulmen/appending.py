# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""New rows of keys and values into caches, and rotary embeddings.

The rotation is that of Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding
(2021), section 3.4.2: a pair (x0, x1) at position t becomes

    (x0 cos[t, j] - x1 sin[t, j], x1 cos[t, j] + x0 sin[t, j])
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._calls import check_out, run
from ._library import library
from .array_types import Array, array_type_of, in_memory, is_torch, named_dtype, scales, torch_call
from .errors import ArgumentError, DTypeError, UnsupportedError, flag, kind_of, shown, whole
from .layouts import Layout, layout_of
from .page_tables import INTEGERS, SCALES, AppendArrays, as_records, is_records, table_keywords


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
    stream: Any = None,
) -> Any:
    """Writes new rows into caches in pages, in place, and rotates k and q where cos and sin are.

    One kernel on a GPU: nothing waits, nothing is read by the host, CUDA graphs capture it.

    Args:
        k_pages: the pool of keys: (page, kv_head, row, dim_qk) with layout "bhsd" and "hsd", (page,
            row, kv_head, dim_qk) with "bshd" and "shd". Written; any strides.
            Records of latent attention are bytes, 656 or 584 in the place of dim_qk = 576 or 512,
            as `attention_mla` reads them: numbers before the last 64 are stored as float8_e4m3fn,
            each 128 or 64 by the smallest power of two that they fit, and the last 64 rotate.
        v_pages: the pool of values, likewise with dim_v. Written. None of records.
        k_new: (batch, kv_head, row, dim_qk) in the order that `layout` names; with cu_new (total,
            kv_head, dim_qk).
        v_new: likewise with dim_v. None of records.
        slots: (batch, row), or packed (total,), int32 or int64: row r of page p is slot
            p * page_size + r; -1 skips a row. Or a tuple (page_table, kv_lengths) as
            `attention_paged` takes them, with kv_lengths the keys present before: rows go behind
            them. The table may be (indptr, indices), or None for contiguous caches.
        cu_new: (batch + 1,): packed rows: request b has cu_new[b] to cu_new[b + 1] - 1.
        positions: (row,) or (batch, row), packed (total,): which row of cos and sin; None: behind
            the keys present.
        batch_index: (batch,): contiguous caches: which entry each request has; beside a table that
            is None.
        cos: (position, rotary_dim / 2), in float32 or the dtype of k_new: see `rotary_tables`.
        sin: likewise.
        interleaved: elements 2 j and 2 j + 1 are a pair, instead of j and j + rotary_dim / 2.
        q: (batch, head, row, dim_qk), rows as in k_new: rotated too.
        k_scale, v_scale: of quantised caches, float8_e4m3fn, float8_e5m2 or int8, as `attention`
            reads them: given, never computed from the rows. x / scale is stored, x being rotated
            before: the nearest number of the type, ties to even, its largest for what is beyond it;
            NaN stays, and is 0 in int8. None: 1.
        layout: the axes of k_new, v_new and q, in order, as in `attention`.
        stream: as in `attention`.

    Returns:
        None, or with q the rotated q, a new array.

    Raises:
        fulmen.Error: as `attention`; on the CPU ArgumentError for a slot, a page, a length or a
            position that is out of range, with nothing written. On a GPU such a row is not written,
            and `fulmen.device_faults` tells. Two rows of a call may not have one slot.
        UnsupportedError: JAX arrays, which cannot be written to: `fulmen.jax.append_kv`.

    >>> import numpy as np, fulmen
    >>> k_pages, v_pages = np.zeros((2, 3, 1, 2, 2), np.float32)  # 3 pages of 2 rows
    >>> row = np.ones((1, 1, 1, 2), np.float32)
    >>> fulmen.append_kv(k_pages, v_pages, row, 2 * row, ([[2, 0]], [1]))  # the second of page 2
    >>> k_pages[2, 0].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    named = placement(slots, batch_index, cu_new)
    for name, x in zip(SCALES, (k_scale, v_scale)):
        if isinstance(x, str):
            raise UnsupportedError(
                f"{name} is {shown(x)}; scales are given, append_kv computes none: pass a number, "
                "or a float32 array such as the largest magnitudes of rows over 448"
            )
    named.update(positions=positions, cos=cos, sin=sin, q=q, k_scale=k_scale, v_scale=v_scale)
    interleaved = bool(flag("interleaved", interleaved))
    if hasattr(k_pages, "shape") and hasattr(k_new, "shape"):
        k_pages = as_records(k_pages, k_new.shape[-1])
    if is_torch(k_pages):
        return torch_call("append_kv")(
            k_pages, v_pages, k_new, v_new, named, interleaved, layout, stream
        )
    axes = layout_of(layout, cu_new is not None)
    written(k_pages, v_pages, k_new, v_new, axes)
    array_type = array_type_of(k_pages, "k_pages")
    named = {name: _integers(name, x, k_pages) for name, x in named.items()}
    arrays = AppendArrays(k_pages, v_pages, None, k_new, v_new, **named)
    where = array_type.stream(k_pages, stream), array_type
    q_out = None
    if q is not None:
        axes.check(q, "q")
        with array_type.on(where[0], k_pages):
            q_out = array_type.empty(q.shape, array_type.dtype(q), k_pages)
    return append_arrays(arrays._replace(q_out=q_out), interleaved, axes, where)


def append_arrays(
    arrays: AppendArrays, interleaved: bool, axes: Layout, where: tuple[int, Any]
) -> Any:
    """`append_kv` of arrays of any type that are written in place."""
    every = AppendArrays(*in_memory(tuple(arrays), AppendArrays._fields))
    return append_in_memory(every, interleaved, axes, where)


def append_in_memory(
    arrays: AppendArrays, interleaved: bool, axes: Layout, where: tuple[int, Any]
) -> Any:
    """The same where memory is known to hold the numbers of each array."""
    call = library().append_kv, (interleaved,), where, axes.code
    return run(*call, arrays, range(3), arrays._fields)[2]


def placement(slots: Any, batch_index: Array, cu_new: Array) -> dict[str, Any]:
    """Where rows go, by the names of the library's arrays.

    Raises:
        ArgumentError, DTypeError: slots is nothing that says it.
    """
    if slots is None:
        raise ArgumentError("slots is None; slots, or a tuple (page_table, kv_lengths), are needed")
    if not isinstance(slots, tuple):
        if batch_index is not None:
            raise ArgumentError("slots and batch_index are both given; leave batch_index=None")
        return {"slots": slots, "cu_new": cu_new}
    if len(slots) != 2:
        raise ArgumentError(
            f"slots is a tuple of {len(slots)}; (page_table, kv_lengths) has two, and slots are an "
            "array or a list"
        )
    table, lengths = slots
    found: dict[str, Any] = table_keywords(table, batch_index)
    if lengths is None:
        raise ArgumentError("kv_lengths is None; the keys present before, (batch,), are needed")
    if "page_table" not in found:
        found["page_table"] = _own_entries(lengths)
    return {**found, "kv_lengths": lengths, "cu_new": cu_new}


def _own_entries(lengths: Any) -> Array:
    """Of contiguous caches: request b has entry b."""
    if isinstance(lengths, (list, tuple)):
        lengths = np.asarray(lengths)
    if len(getattr(lengths, "shape", ())) != 1:
        raise DTypeError(f"kv_lengths is {kind_of(lengths)}; one integer a request is expected")
    if is_torch(lengths):
        return lengths.new_ones(lengths.shape).cumsum(0).sub_(1)[:, None]
    return [[entry] for entry in range(lengths.shape[0])]


def _integers(name: str, x: Any, like: Array) -> Any:
    """An array of integers; from a list of Python's one where `like` is. Scales from a number."""
    if name in SCALES and x is not None:
        return scales(x, like)
    if not isinstance(x, (list, tuple)) or name not in INTEGERS:
        return x
    try:
        made = np.asarray(x)
    except Exception:
        made = None
    if made is None or (made.dtype.kind not in "iu" and made.size > 0):
        raise DTypeError(f"{name} is {shown(x)}; an array of integers is expected")
    return array_type_of(like, name).moved(made.astype(np.int64), like)


def written(k_pages: Array, v_pages: Array, k_new: Array, v_new: Array, axes: Layout) -> None:
    """Refuses caches that cannot be written to, and arrays with other axes than the layout's."""
    values = () if v_pages is None and is_records(k_pages) else ((v_pages, "v_pages"),)
    for x, name in ((k_pages, "k_pages"), *values):
        if type(x).__module__.startswith(("jax", "jaxlib")):
            raise UnsupportedError(
                f"{name} is a JAX array, which cannot be written to; fulmen.jax.append_kv takes "
                "the same arguments and returns the caches"
            )
        axes.of_pools.check(x, name)
        check_out(x, None, name)
    for x, name in ((k_new, "k_new"), (v_new, "v_new")):
        if x is not None or values:
            axes.check(x, name)


def rotary(
    x: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    layout: str = "bhsd",
    stream: Any = None,
) -> Array:
    """The rotary embedding of x: pairs of the first rotary_dim elements of each head rotate.

    Computed in float32 (float64 for float64), rounded once; the other elements are copied. With
    PyTorch tensors differentiable in x; in JAX programs `fulmen.jax.rotary` is.

    Args:
        x: (batch, head, row, dim) in the order that `layout` names.
        positions: (row,) for all entries or (batch, row), int32 or int64: which row of cos and sin;
            None: row i is at position i.
        cos: (position, rotary_dim / 2), in float32 or the dtype of x: see `rotary_tables`.
        sin: likewise.
        interleaved: elements 2 j and 2 j + 1 are a pair, instead of j and j + rotary_dim / 2.
        layout: the axes of x, in order, as in `attention`.
        stream: as in `attention`.

    Returns:
        A new array.

    Raises:
        fulmen.Error: as `attention`; on the CPU ArgumentError for a position outside the tables. On
            a GPU such a row is not written, and `fulmen.device_faults` tells.

    >>> import numpy as np, fulmen
    >>> cos, sin = fulmen.rotary_tables(8, 4)
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> fulmen.rotary(x, [0, 7], cos, sin)[0, 0].round(2)
    array([[1.  , 1.  , 1.  , 1.  ],
           [0.1 , 0.93, 1.41, 1.07]], dtype=float32)
    """
    interleaved = bool(flag("interleaved", interleaved))
    if is_torch(x):
        return torch_call("rotary")(x, positions, cos, sin, interleaved, layout, stream)
    axes = layout_of(layout)
    axes.check(x, "x")
    return rotary_arrays(
        x, _integers("positions", positions, x), cos, sin, interleaved, axes, stream
    )


def rotary_arrays(
    x: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    interleaved: bool,
    axes: Layout,
    stream: Any = None,
) -> Array:
    """`rotary` of arrays of any type, without gradients."""
    names = ("out", "x", "positions", "cos", "sin")
    arrays = in_memory((x, positions, cos, sin), names[1:])
    array_type = array_type_of(x, "x")
    where = array_type.stream(x, stream), array_type
    with array_type.on(where[0], x):
        out = array_type.empty(x.shape, array_type.dtype(x), x)
    every = (out, *arrays)
    found = run(library().rotary, (interleaved,), where, axes.code, every, range(1), names)
    return array_type.result(found[0], x)


def rotary_tables(
    positions: Any,
    rotary_dim: Any,
    *,
    base: float = 10000.0,
    frequencies: Any = None,
    dtype: Any = "float32",
) -> tuple[Array, Array]:
    """cos and sin of a rotary embedding, computed in float64 and rounded once.

    cos[t, j] = cos(positions[t] * frequency[j]), frequency[j] = base^(-2 j / rotary_dim).

    Args:
        positions: how many positions from 0 on, or the positions themselves: any numbers.
        rotary_dim: how many elements of a head rotate: an even number.
        base: of the frequencies.
        frequencies: (rotary_dim / 2,) in radians a position, instead of those of `base`: rules such
            as YaRN or that of Llama 3 are other frequencies.
        dtype: of the tables.

    Returns:
        (cos, sin), NumPy arrays (position, rotary_dim / 2).

    Raises:
        fulmen.Error: an argument is none of these.

    >>> cos, sin = rotary_tables(2, 4, base=100.0)
    >>> sin.round(3)
    array([[0.   , 0.   ],
           [0.841, 0.1  ]], dtype=float32)
    """
    pairs, rest = divmod(whole("rotary_dim", rotary_dim, 0), 2)
    if rest:
        raise ArgumentError(f"rotary_dim is {shown(rotary_dim)}; pairs need an even number")
    if frequencies is None:
        frequency = float(base) ** (-np.arange(pairs, dtype=np.float64) / max(pairs, 1))
    else:
        frequency = np.asarray(frequencies, np.float64)
        if frequency.shape != (pairs,):
            raise ArgumentError(
                f"frequencies has shape {frequency.shape}; ({pairs},), one a pair, is expected"
            )
    if hasattr(positions, "__index__") and getattr(positions, "shape", ()) == ():
        place = np.arange(whole("positions", positions, 0), dtype=np.float64)
    else:
        place = np.asarray(positions, np.float64)
    angles = np.multiply.outer(place, frequency)
    wanted = named_dtype(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    return np.cos(angles).astype(wanted), np.sin(angles).astype(wanted)
