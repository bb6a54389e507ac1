# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which keys a query row of sparse latent attention sees (DeepSeek-V3.2, 2025, section 2.1)."""

from __future__ import annotations

from typing import Any

from ._calls import run
from ._library import library
from .array_types import Array, array_type_of, in_memory, is_torch, scales, torch_call
from .errors import ArgumentError, DTypeError, ShapeError, flag, kind_of, whole
from .layouts import Layout, layout_of

NAMES = ("indices", "q", "k", "weights", "k_scale", "kv_lengths", "page_table")


def mla_indexer(
    q: Array,
    k: Array,
    weights: Array,
    topk: int,
    *,
    page_table: Array = None,
    kv_lengths: Array = None,
    causal: bool = False,
    k_scale: Any = None,
    layout: str = "bhsd",
    stream: Any = None,
) -> Array:
    """The keys of the highest scores of each query row, which `attention_mla` takes as `indices`.

    The score of key j for row i is, over the heads h of q,

        s[i, j] = sum over h of weights[i, h] * max(0, dot(q[i, h], k[j]))

    Nothing of the size of rows times keys is in memory. Of equal scores the lower key goes first;
    NaN counts as higher than every number. Scores are sums in float32: each is within (dim + heads
    + 2) * 2^-23 * A of its exact value, A being the same sum of magnitudes, so that no key that is
    left out is better than a chosen one by more than their two bounds; where sums are exact the
    choice is.

    Args:
        q: (batch, head, row, dim) in the order that `layout` names: float32, float16, bfloat16 or
            float8_e4m3fn.
        k: (batch, 1, key, dim) likewise, one head for all: the dtype of q, or float8_e4m3fn. With
            page_table a pool, (page, 1, row of the page, dim).
        weights: as q without its last axis: float32, float16 or bfloat16. Scales of q belong into
            them.
        topk: how many keys of a row, at most: any number; on a GPU up to 4096
            (3175 on compute capability 7.5).
        page_table: (batch, page of the request), or (page,) for all: int32 or int64.
        kv_lengths: (batch,) keys of each request. None: all.
        causal: row i sees the keys up to its own, where the last row stands at the last key.
        k_scale: what k is multiplied by where it is float8_e4m3fn: a number, or float32 that
            broadcasts to k with a dim of 1.
        layout: the axes of q and k, in order, as in `attention`.
        stream: as in `attention`.

    Returns:
        (batch, row, topk) int32, int64 where slots need it: the slots of the keys, page *
        page_size + row of the page, or b * keys + j without a table, by rising j; then -1.
        Nothing is differentiable in it.

    Raises:
        fulmen.Error: as `attention`; on the CPU ArgumentError for a length or a page that is out of
            range. On a GPU such a request counts as empty, keys of such a page as hidden, and
            `fulmen.device_faults` tells.

    >>> import numpy as np, fulmen
    >>> q, k = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 1, 5, 4), np.float32)
    >>> k[0, 0, 1], k[0, 0, 3] = 2, 1
    >>> fulmen.mla_indexer(q, k, np.ones((1, 2, 1), np.float32), 3)  # and the first of equals
    array([[[0, 1, 3]]], dtype=int32)
    """
    topk = whole("topk", topk, 0)
    causal = bool(flag("causal", causal))
    named = {"k_scale": k_scale, "kv_lengths": kv_lengths, "page_table": page_table}
    if is_torch(q):
        if stream is not None:
            raise ArgumentError(
                "stream is given with PyTorch tensors; their work goes to torch's current stream: "
                "use torch.cuda.stream(...) and leave stream=None"
            )
        return torch_call("mla_indexer")(q, k, weights, topk, named, causal, layout)
    axes = checked_axes(q, k, weights, layout)
    return index_arrays(q, k, weights, topk, named, causal, axes, stream)


def checked_axes(q: Array, k: Array, weights: Array, layout: str) -> Layout:
    """The layout, by which q, k and weights have their axes.

    Raises:
        ArgumentError, DTypeError, ShapeError: they do not.
    """
    axes = layout_of(layout)
    axes.check(q, "q")
    axes.check(k, "k")
    if not hasattr(weights, "shape"):
        raise DTypeError(f"weights is {kind_of(weights)}; an array is expected")
    if tuple(weights.shape) != tuple(q.shape[:-1]):
        raise ShapeError(
            f"weights has shape {tuple(weights.shape)}; that of q without its last axis, "
            f"{tuple(q.shape[:-1])}, is needed"
        )
    return axes


def shape_of_indices(q: Array, topk: int, axes: Layout) -> tuple[int, ...]:
    """(batch, row, topk)."""
    row = -3 if axes.rows_before_heads else -2
    return (*q.shape[:-3], q.shape[row], topk)


def dtype_of_indices(k: Array, axes: Layout) -> str:
    """int32, or int64 where the slots of k need it."""
    rows = k.shape[-3 if axes.rows_before_heads else -2]
    pages = k.shape[0] if len(k.shape) == 4 else 1
    return "int64" if pages * rows > 2**31 - 1 else "int32"


def index_arrays(
    q: Array,
    k: Array,
    weights: Array,
    topk: int,
    named: dict[str, Any],
    causal: bool,
    axes: Layout,
    stream: Any = None,
) -> Array:
    """`mla_indexer` of arrays of any type."""
    if named["k_scale"] is not None:
        named = {**named, "k_scale": scales(named["k_scale"], q)}
    arrays = in_memory((q, k, weights, *named.values()), NAMES[1:])
    array_type = array_type_of(q, "q")
    where = array_type.stream(q, stream), array_type
    with array_type.on(where[0], q):
        dtype = array_type.dtype_named(dtype_of_indices(k, axes))
        indices = array_type.empty(shape_of_indices(q, topk, axes), dtype, q)
    every = (indices, *arrays)
    found = run(library().mla_indexer, (causal,), where, axes.code, every, range(1), NAMES)
    return array_type.result(found[0], q)
