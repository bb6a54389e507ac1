# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What masks mean: as a boolean matrix, and block by block without looking at every pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._calls import call
from ._library import library
from .array_types import Array, NumpyType, array_type_of
from .errors import ShapeError, flag, whole
from .layouts import phantom
from .masks import Blocks, Documents, Expression, Tree, split
from .options import integers, prepare

EMPTY, PARTIAL, FULL = 0, 1, 2  # the kinds of a block

# What may be a list of integers.
_INTEGERS = ("q_lengths", "kv_lengths", "kv_start", "positions", "cu_q", "cu_kv", "q_segments",
             "kv_segments")  # fmt: skip


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
    kv_start: Array = None,
    positions: Array = None,
    cu_q: Array = None,
    cu_kv: Array = None,
    q_segments: Array = None,
    kv_segments: Array = None,
    batch: int = 1,
    heads: int = 1,
) -> Array:
    """The boolean matrix that the options mean: the definition of their combination.

    Args:
        sq: query rows; packed, the total.
        skv: keys; packed, the total.
        causal, alignment, window, mask, bias, q_lengths, kv_lengths: as in `fulmen.attention`; of
            bias only where it is -inf.
        kv_start, positions: as in `fulmen.attention_paged`.
        cu_q, cu_kv: as in `fulmen.attention_varlen`.
        q_segments, kv_segments: as in `fulmen.attention`.
        batch, heads: at least so many, for masks that are texts with b or h.

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
    call_ = _masking(
        sq, skv, batch, heads,
        {"causal": causal, "alignment": alignment, "window": window, "mask": mask, "bias": bias,
         "q_lengths": q_lengths, "kv_lengths": kv_lengths, "kv_start": kv_start,
         "positions": positions, "cu_q": cu_q, "cu_kv": cu_kv, "q_segments": q_segments,
         "kv_segments": kv_segments},
    )  # fmt: skip
    matrix = NumpyType.empty(call_.shape, np.uint8, None)
    settings = call_.settings
    leading = (matrix, settings.problem)
    call(library().dense_mask, leading, settings.layout.code, call_.inputs, range(0))
    seen = matrix.view(np.bool_)
    return seen if call_.has_axes else seen[0, 0]


class Rows(NamedTuple):
    """Rows of blocks of different lengths, one behind the other."""

    offsets: Array  # (number of rows + 1)
    blocks: Array  # the number of each block that is not empty, rising in a row
    kinds: Array  # of each: 1 partial, 2 full


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Which blocks of pairs masks leave; made by `fulmen.block_map`.

    Attributes:
        kinds: (batch, head, q_block, kv_block) int8: 0 no pair is visible, 2 all are, 1 some, or it
            could not be said without looking at all pairs.
        size: query rows and keys of a block.
    """

    kinds: Array
    size: tuple[int, int]

    @property
    def density(self) -> float:
        """The part of the blocks that are not empty."""
        return float(np.mean(self.kinds != EMPTY)) if self.kinds.size else 0.0

    def by_query(self) -> Rows:
        """The blocks of keys of each block of rows, those of (batch, head, q_block) in order."""
        return _rows_of(self.kinds)

    def by_key(self) -> Rows:
        """The blocks of rows of each block of keys, those of (batch, head, kv_block) in order."""
        return _rows_of(self.kinds.swapaxes(2, 3))

    def lists(self) -> Array:
        """The blocks that are not empty as lists for `fulmen.masks.blocks`, -1 behind the last.

        They speak of whole blocks: give the masks that leave some partial beside them.
        """
        seen = self.kinds != EMPTY
        counts = seen.sum(axis=3)
        found = np.full((*counts.shape, max(1, int(counts.max(initial=0)))), -1, np.int32)
        *at, block = np.nonzero(seen)
        found[(*at, (np.cumsum(seen, axis=3) - 1)[seen])] = block
        return found


def _rows_of(kinds: Array) -> Rows:
    kinds = kinds.reshape(-1, kinds.shape[3])
    seen = kinds != EMPTY
    offsets = np.concatenate(([0], np.cumsum(seen.sum(axis=1))))
    return Rows(offsets, np.nonzero(seen)[1], kinds[seen])


def block_map(
    sq: int,
    skv: int,
    *,
    size: int | tuple[int, int] = 128,
    exact: bool = False,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    q_lengths: Array = None,
    kv_lengths: Array = None,
    q_segments: Array = None,
    kv_segments: Array = None,
    batch: int = 1,
    heads: int = 1,
) -> BlockMap:
    """Which blocks of rows and keys the options leave visible, without looking at every pair.

    A mask that is a text is evaluated on intervals: of a block from the ends of its rows and keys,
    and from the least and the most of what it reads there. So it costs a few steps a block, not one
    a pair; a block of which that does not tell counts as partial.

    Args:
        sq, skv: query rows, keys.
        size: rows and keys of a block, at least 1, or one number for both.
        exact: what would be partial is looked at pair by pair.
        causal, alignment, window, mask, q_lengths, kv_lengths, q_segments, kv_segments: as in
            `fulmen.attention`. A boolean array is known pair by pair only: with exact=True.
        batch, heads: at least so many, for masks that are texts with b or h.

    Raises:
        fulmen.Error: as `fulmen.attention`.

    >>> import fulmen
    >>> fulmen.block_map(256, 256, causal=True).kinds[0, 0]
    array([[1, 0],
           [2, 1]], dtype=int8)
    """
    rows, keys = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    rows, keys = whole("size", rows, 1), whole("size", keys, 1)
    call_ = _masking(
        sq, skv, batch, heads,
        {"causal": causal, "alignment": alignment, "window": window, "mask": mask,
         "q_lengths": q_lengths, "kv_lengths": kv_lengths, "q_segments": q_segments,
         "kv_segments": kv_segments},
    )  # fmt: skip
    shape = (*call_.shape[:2], -(-call_.shape[2] // rows), -(-call_.shape[3] // keys))
    kinds = NumpyType.empty(shape, np.int8, None)
    settings = call_.settings
    leading = (kinds, settings.problem, rows, keys, int(flag("exact", exact)))
    call(library().block_map, leading, settings.layout.code, call_.inputs, range(0))
    return BlockMap(kinds, (rows, keys))


class _Masking(NamedTuple):
    """A call of which the masks count alone."""

    settings: Any
    inputs: tuple[Array, ...]
    shape: tuple[int, ...]  # of the matrix that they mean
    has_axes: bool  # whether an option has a batch or head axis


def _masking(sq: Any, skv: Any, batch: Any, heads: Any, given: dict[str, Any]) -> _Masking:
    sq, skv = whole("sq", sq), whole("skv", skv)
    for name, rows in (("sq", sq), ("skv", skv)):
        if rows < 0:
            raise ShapeError(f"{name} is {rows}; at least 0 rows are allowed")
    given = {name: x if name == "mask" else _on_host(x) for name, x in given.items()}
    if given["mask"] is not None:
        given["mask"] = _mask_on_host(given["mask"])
    for name in _INTEGERS:
        given[name] = integers(given.get(name))
    parts = {} if given["mask"] is None else split(given["mask"])
    of_pairs = (parts.get("mask"), given.get("bias"), parts.get("blocks"))
    of_rows = (parts.get("q_ids"), parts.get("tree"), given["positions"])
    lengths: tuple[Array, ...] = (given["q_lengths"], given["kv_lengths"], given["kv_start"])
    segments = (given["q_segments"], given["kv_segments"])
    lengths += tuple(x for x in segments if len(_shape(x)) == 3)  # with a batch axis
    cu_q = given["cu_q"]
    least = whole("batch", batch, 1), whole("heads", heads, 1)
    of_arrays = _batch_and_heads(of_pairs, of_rows, lengths, cu_q)
    batch, heads = (max(sizes) for sizes in zip(least, of_arrays))
    kv_heads = _kv_heads(parts.get("blocks"), heads)
    q = np.empty((batch, heads, sq, 0), np.float32)
    k = np.empty((batch, kv_heads, skv, 0), np.float32)
    v = phantom((batch, kv_heads, skv, 1), np.float32)
    shape: tuple[int, ...] = (batch, heads, sq, skv)
    if cu_q is not None:
        q, k, v = q[0], k[0], v[0]
        spans = [np.diff(np.asarray(x)) for x in (cu_q, given["cu_kv"])]
        shape = (len(spans[0]), heads, *(int(x.max(initial=0)) for x in spans))
    given["layout"] = "bhsd" if cu_q is None else "hsd"
    settings, inputs, _ = prepare(q, k, v, given)
    has_axes = (
        batch * heads > 1
        or cu_q is not None
        or any(len(getattr(x, "shape", ())) > 2 for x in of_pairs)
    )
    return _Masking(settings, inputs, shape, has_axes)


def _kv_heads(lists: Any, heads: int) -> int:
    """As many as there are lists of blocks for, where they may be those of k."""
    listed = int((1, 1, 1, *_shape(lists))[-3])
    return listed if listed > 0 and heads % listed == 0 else 1


def _on_host(x: Any) -> Any:
    """An array in host memory, copied there from a GPU if need be; lists and None as they are."""
    return array_type_of(x, "an array").on_host(x) if hasattr(x, "__dlpack__") else x


def _mask_on_host(mask: Any) -> Any:
    """`mask=` of the attention calls with its arrays in host memory."""
    parts = mask if isinstance(mask, (tuple, list)) else (mask,)
    return tuple(_part_on_host(part) for part in parts)


def _part_on_host(part: Any) -> Any:
    if isinstance(part, Documents):
        return Documents(_on_host(part.q_ids), _on_host(part.kv_ids))
    if isinstance(part, Expression):
        return Expression(part.text, {name: _on_host(x) for name, x in part.captures.items()})
    if isinstance(part, Blocks):
        return Blocks(integers(_on_host(part.lists), "lists"), part.size)
    return Tree(_on_host(part.words)) if isinstance(part, Tree) else _on_host(part)


def _batch_and_heads(
    of_pairs: Sequence[Array], of_rows: Sequence[Array], lengths: Sequence[Array], cu_q: Array
) -> tuple[int, int]:
    """The extents of the two leading axes that the options bring."""
    batch = heads = 1
    for x in of_pairs:
        shape = (1, 1, 1, 1, *_shape(x))[-4:]
        batch, heads = max(batch, shape[0]), max(heads, shape[1])
    if cu_q is not None:
        return 1, heads
    for x in lengths:
        batch = max(batch, *_shape(x)[:1], 1)
    for x in of_rows:
        if len(_shape(x)) == 2:
            batch = max(batch, _shape(x)[0])
    return batch, heads


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array; () for what is none, which the library refuses by name."""
    shape = getattr(x, "shape", ())
    return shape if isinstance(shape, tuple) else ()
