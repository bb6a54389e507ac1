# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The mask as a matrix: what a set of options lets each row see, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._library import call, library
from .errors import ShapeError
from .kinds import Array, kind_of
from .masks import Documents
from .options import prepare, split_mask


def dense_mask(
    sq: int,
    skv: int,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Array = None,
    q_lengths: Array = None,
    kv_lengths: Array = None,
    cu_q: Array = None,
    cu_kv: Array = None,
) -> Array:
    """The boolean matrix that the options mean: the definition of their combination.

    Args:
        sq: query rows; packed, the total.
        skv: keys; packed, the total.
        causal, alignment, window, mask, bias, q_lengths, kv_lengths: as in `fulmen.attention`; of
            bias only where it is -inf.
        cu_q, cu_kv: as in `fulmen.attention_varlen`.

    Returns:
        A NumPy array, computed on the CPU from host copies of arrays that are on a GPU:
        (sq, skv), True where visible; (batch, head, sq, skv) when an option has a batch or head
        axis; packed (sequence, 1, longest q, longest kv).

    Raises:
        fulmen.Error: as `fulmen.attention`. Quadratic in memory: for tests and pictures.

    >>> import fulmen
    >>> fulmen.dense_mask(2, 4, causal=True).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    for name, rows in (("sq", sq), ("skv", skv)):
        if rows < 0:
            raise ShapeError(f"{name} is {rows}; at least 0 rows are allowed")
    if mask is not None:
        mask = _mask_on_host(mask)
    bias, q_lengths, kv_lengths, cu_q, cu_kv = (
        _on_host(x) for x in (bias, q_lengths, kv_lengths, cu_q, cu_kv)
    )
    visible, q_ids = (None, None) if mask is None else split_mask(mask)[2:4]
    batch, heads = _batch_and_heads(visible, bias, q_ids, q_lengths, kv_lengths, cu_q)
    q, k = np.empty((batch, heads, sq, 0), np.float32), np.empty((batch, 1, skv, 0), np.float32)
    v = np.empty((batch, 1, skv, 1), np.float32)
    shape: tuple[int, ...] = (batch, heads, sq, skv)
    if cu_q is not None:
        q, k, v = q[0], k[0], v[0]
        spans = [np.diff(np.asarray(x)) for x in (cu_q, cu_kv)]
        shape = (len(spans[0]), heads, *(int(x.max(initial=0)) for x in spans))
    numbers, _, inputs, _ = prepare(
        q, k, v, causal=causal, alignment=alignment, window=window, mask=mask, bias=bias,
        q_lengths=q_lengths, kv_lengths=kv_lengths, cu_q=cu_q, cu_kv=cu_kv,
        layout="bhsd" if cu_q is None else "hsd",
    )  # fmt: skip
    matrix = np.empty(shape, np.uint8)
    call(library().dense_mask, (matrix, *numbers), 0, inputs, range(0))
    seen = matrix.view(np.bool_)
    has_axes = (
        batch * heads > 1
        or cu_q is not None
        or any(len(getattr(x, "shape", ())) > 2 for x in (visible, bias))
    )
    return seen if has_axes else seen[0, 0]


def _on_host(x: Any) -> Any:
    """An array in host memory, copied there from a GPU if need be; lists and None as they are."""
    return kind_of(x, "an array").on_host(x) if hasattr(x, "__dlpack__") else x


def _mask_on_host(mask: Any) -> Any:
    """`mask=` of the attention calls with its arrays in host memory."""
    parts = mask if isinstance(mask, (tuple, list)) else (mask,)
    return tuple(
        Documents(_on_host(part.q_ids), _on_host(part.kv_ids))
        if isinstance(part, Documents)
        else _on_host(part)
        for part in parts
    )


def _batch_and_heads(
    visible: Array, bias: Array, q_ids: Array, q_lengths: Array, kv_lengths: Array, cu_q: Array
) -> tuple[int, int]:
    """The extents of the two leading axes that the options bring."""
    batch = heads = 1
    for x in (visible, bias):
        shape = (1, 1, 1, 1, *np.shape(x))[-4:] if x is not None else (1, 1, 1, 1)
        batch, heads = max(batch, shape[0]), max(heads, shape[1])
    if cu_q is not None:
        return 1, heads
    for lengths in (q_lengths, kv_lengths):
        if lengths is not None:
            batch = max(batch, len(lengths))
    if q_ids is not None and len(np.shape(q_ids)) == 2:
        batch = max(batch, np.shape(q_ids)[0])
    return batch, heads
