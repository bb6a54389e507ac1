# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What is asked for, and which keys a query sees: the one dense matrix that lengths and masks mean.

visible = row and column inside the lengths AND (causal OR prefix) AND window AND every other mask
AND bias above -inf. Query i stands at i + shift, with shift = kv_len - q_len for bottom_right and 0
for top_left, or at positions[i]: for causal, window, ALiBi and chunks alike. Keys below kv_start
are hidden and positions count from it, and keys without a slot. Segments say where rows and keys
stand, for dropout and expressions too, and hide those that none has. Compared with pictures drawn
by hand and with fulmen.dense_mask in tests/cases/test_visible.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import fulmen

from . import block_lists
from .arrays import Array, Stored
from .expressions import EXPRESSIONS, Pairs
from .scores import Scalars


@dataclass(frozen=True)
class Options(Scalars):
    """What is asked for beside the tensors; arrays as the caller of fulmen gives them."""

    window: tuple[int, int] = (-1, -1)  # left, right; inclusive; -1: no limit
    masks: tuple[Any, ...] = ()  # bool arrays (true: visible), values of fulmen.masks
    bias: Array | None = None  # broadcasts to (batch, head, q_row, kv_row)
    alibi_slopes: Array | None = None  # (head,) or (batch, head)
    sinks: Array | None = None  # (head,)
    q_lengths: Array | None = None  # (batch,)
    kv_lengths: Array | None = None  # (batch,)
    kv_start: Array | None = None  # (batch,): left padding
    slotless: Array | None = None  # (batch, kv_row) bool: keys without a slot
    positions: Array | None = None  # (batch, q_row) or, packed, (q_row of all sequences,)
    q_segments: Array | None = None  # (batch or 1, segment, 3): first row, rows, position
    kv_segments: Array | None = None  # likewise of keys
    cu_q: Array | None = None  # (batch + 1,): packed
    cu_kv: Array | None = None  # (batch + 1,); None beside cu_q: k and v of caches are dense
    expression: str = ""  # expressions.EXPRESSIONS
    captures: dict[str, Any] = field(default_factory=dict)  # what it reads
    dropout_p: float = 0.0
    rng: tuple[int, int] = (0, 0)
    group: int = 1  # heads of q to one of k
    heads: int = 1  # of q

    def scale_for(self, dim: int) -> float:
        """The scale of the scores."""
        return 1 / math.sqrt(max(dim, 1)) if self.scale is None else self.scale


@dataclass
class Problem:
    """Tensors by their meaning: no strides, no layout, hidden places may hold anything."""

    q: Array  # (batch, head, q_row, dim) or, packed, (head, q_row, dim)
    k: Array  # (batch, kv_head, kv_row, dim) or, packed by cu_kv, (kv_head, kv_row, dim)
    v: Array  # (batch, kv_head, kv_row, dim_v) or, packed by cu_kv, (kv_head, kv_row, dim_v)
    options: Options
    do: Array | None = None  # (batch, head, q_row, dim_v) or (head, q_row, dim_v)
    dlse: Array | None = None  # (batch, head, q_row) or (head, q_row)
    stored: dict[str, Stored] = field(default_factory=dict)  # of "q", "k", "v", where quantised
    records: Array | None = None  # of the keys (batch, kv_head, kv_row, bytes)


class Segment(NamedTuple):
    """Where one head of one sequence lies: q[q_at] is (q_row, dim), k[kv_at] is (kv_row, dim)."""

    batch: int
    head: int
    q_at: Any
    kv_at: Any


def segments(problem: Problem) -> Iterator[Segment]:
    """Every head of every sequence, in the order in which gradients are summed."""
    options = problem.options
    packed = options.cu_q is not None
    heads, kv_heads = problem.q.shape[-3], problem.k.shape[-3]
    group = heads // kv_heads if kv_heads else 1
    num_batches = len(options.cu_q) - 1 if options.cu_q is not None else problem.q.shape[0]
    for b in range(num_batches):
        for h in range(heads):
            if not packed:
                yield Segment(b, h, (b, h), (b, h // group))
                continue
            assert options.cu_q is not None
            rows = slice(int(options.cu_q[b]), int(options.cu_q[b + 1]))
            kv_at: Any = (b, h // group)
            if options.cu_kv is not None:
                kv_at = (h // group, slice(int(options.cu_kv[b]), int(options.cu_kv[b + 1])))
            yield Segment(b, h, (h, rows), kv_at)


def pair_shape(problem: Problem) -> tuple[int, int, int, int]:
    """(batch, head, q_row, kv_row); packed: (sequence, head, longest q, longest kv)."""
    options, heads = problem.options, problem.q.shape[-3]
    kv_rows = problem.k.shape[-2]
    if options.cu_kv is not None:
        kv_rows = int(np.diff(options.cu_kv).max(initial=0))
    if options.cu_q is None:
        return problem.q.shape[0], heads, problem.q.shape[2], kv_rows
    return len(options.cu_q) - 1, heads, int(np.diff(options.cu_q).max(initial=0)), kv_rows


def pick(x: Array, batch: int, head: int, q_rows: int, kv_rows: int) -> Array:
    """The (q_rows, kv_rows) of one head of an array that broadcasts over four axes."""
    full: Array = np.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape)
    of_head = full[batch if full.shape[0] > 1 else 0, head if full.shape[1] > 1 else 0]
    return np.broadcast_to(of_head[:q_rows, :kv_rows], (q_rows, kv_rows))


def lengths(options: Options, batch: int, q_rows: int, kv_rows: int) -> tuple[int, int]:
    """The true lengths of one sequence inside its rows."""
    q_len = q_rows if options.q_lengths is None else int(options.q_lengths[batch])
    kv_len = kv_rows if options.kv_lengths is None else int(options.kv_lengths[batch])
    return q_len, kv_len


def start(options: Options, batch: int) -> int:
    """The first key of one sequence: keys below it are padding."""
    return 0 if options.kv_start is None else int(options.kv_start[batch])


def standing(segments: Array, batch: int, rows: int) -> Array:
    """Where rows stand by segments, -1 where none has them: (rows,)."""
    found = np.full(rows, -1, np.int64)
    for first, count, position in segments[batch if len(segments) > 1 else 0].astype(np.int64):
        found[first : first + count] = position + np.arange(len(found[first : first + count]))
    return found


def positions(options: Options, batch: int, q_rows: int, kv_rows: int) -> Array:
    """Where each query stands among the keys: (q_rows,)."""
    if options.q_segments is not None:
        return np.maximum(standing(options.q_segments, batch, q_rows), 0)
    if options.positions is not None:
        rows = row_of(options.positions, batch, options.cu_q)
        return np.asarray(rows[:q_rows], np.int64)
    q_len, kv_len = lengths(options, batch, q_rows, kv_rows)
    shift = kv_len - start(options, batch) - q_len
    return np.arange(q_rows) + (0 if options.alignment == "top_left" else shift)


def key_positions(options: Options, batch: int, q_rows: int, kv_rows: int) -> Array:
    """Where each key stands: (kv_rows,); drafts of a tree stand where their queries do."""
    if options.kv_segments is not None:
        return np.maximum(standing(options.kv_segments, batch, kv_rows), 0)
    found = np.arange(kv_rows) - start(options, batch)
    is_tree = any(isinstance(mask, fulmen.masks.Tree) for mask in options.masks)
    if options.positions is not None and is_tree:
        q_len, kv_len = lengths(options, batch, q_rows, kv_rows)
        of_rows = positions(options, batch, q_rows, kv_rows)
        for t in range(max(q_len - kv_len, 0), q_len):
            found[kv_len - q_len + t] = of_rows[t]
    return found


def distance(options: Options, batch: int, q_rows: int, kv_rows: int) -> Array:
    """How far each key is from each query: (q_rows, kv_rows), never negative."""
    position = positions(options, batch, q_rows, kv_rows)
    return np.asarray(abs(position[:, None] - key_positions(options, batch, q_rows, kv_rows)))


def drawn_at(options: Options, batch: int, q_rows: int, kv_rows: int) -> tuple[Array, Array]:
    """The numbers of rows and keys that dropout draws by."""
    rows, keys = np.arange(q_rows), np.arange(kv_rows)
    if options.q_segments is not None:
        rows = positions(options, batch, q_rows, kv_rows)
    if options.kv_segments is not None:
        keys = key_positions(options, batch, q_rows, kv_rows)
    return rows, keys


def of_tree(words: Array, draft: Array) -> Array:
    """Bit `draft` of each row's word; keys before the drafts are visible: (q_rows, kv_rows)."""
    bits = words.astype(np.int64).view(np.uint64)[:, None]
    chosen = bits >> np.clip(draft, 0, 63).astype(np.uint64) & np.uint64(1)
    return np.asarray((draft < 0) | ((draft < 64) & (chosen != 0)))


def row_of(ids: Any, batch: int, offsets: Array | None) -> Array:
    """The ids of one sequence from (row,), (batch, row) or, packed, (row of all sequences,)."""
    ids = np.asarray(ids)
    if offsets is not None:
        ids = ids[int(offsets[batch]) : int(offsets[batch + 1])]
    elif ids.ndim == 2:
        ids = ids[batch if len(ids) > 1 else 0]
    return np.asarray(ids)


def pairs_of(options: Options, at: tuple[int, int], group: int, q_rows: int, kv_rows: int) -> Pairs:
    """What an expression knows of the pairs of one head; at: batch, head."""
    batch, head = at
    q_len, kv_len = lengths(options, batch, q_rows, kv_rows)
    first = start(options, batch)
    place = positions(options, batch, q_rows, kv_rows)[:, None]
    keys = key_positions(options, batch, q_rows, kv_rows)
    return Pairs(
        *(batch, head, head // max(group, 1)),
        i=np.arange(q_rows)[:, None] if options.q_segments is None else place,
        j=np.arange(kv_rows) - first if options.kv_segments is None else keys,
        p=place,
        q_len=q_len,
        kv_len=kv_len - first,
        captures=options.captures,
    )


def visible(options: Options, batch: int, head: int, q_rows: int, kv_rows: int) -> Array:
    """Which keys each query of one head sees: (q_rows, kv_rows) bool."""
    q_len, kv_len = lengths(options, batch, q_rows, kv_rows)
    i, j = np.arange(q_rows)[:, None], np.arange(kv_rows)
    position = positions(options, batch, q_rows, kv_rows)[:, None]
    key = key_positions(options, batch, q_rows, kv_rows)
    see: Array = (i < q_len) & (j >= start(options, batch)) & (j < kv_len)
    if options.q_segments is not None:
        see &= standing(options.q_segments, batch, q_rows)[:, None] >= 0
    if options.kv_segments is not None:
        see &= standing(options.kv_segments, batch, kv_rows) >= 0
    if options.causal:
        ahead = key <= position
        for mask in options.masks:
            if isinstance(mask, fulmen.masks.Prefix):
                ahead = ahead | (key < mask.n)
        see &= ahead
    left, right = options.window
    if left >= 0:
        see &= key >= position - left
    if right >= 0:
        see &= key <= position + right
    for mask in options.masks:
        if isinstance(mask, fulmen.masks.Prefix):
            continue
        if isinstance(mask, fulmen.masks.Documents):
            kv_ids = mask.q_ids if mask.kv_ids is None else mask.kv_ids
            q_ids = row_of(mask.q_ids, batch, options.cu_q)
            see &= q_ids[:, None] == row_of(kv_ids, batch, options.cu_kv)
        elif isinstance(mask, fulmen.masks.Chunks):
            see &= position // mask.size == key // mask.size
        elif isinstance(mask, fulmen.masks.Tree):
            words = row_of(mask.words, batch, options.cu_q)[:q_rows]
            see &= of_tree(words, j - (kv_len - q_len))
        elif isinstance(mask, fulmen.masks.Blocks):
            first = start(options, batch)
            see &= block_lists.shows(mask, batch, head, options.heads, i, j - first)
        else:
            see &= pick(mask, batch, head, q_rows, kv_rows)
    if options.slotless is not None:
        see &= ~options.slotless[batch]
    if options.bias is not None:
        see &= pick(options.bias, batch, head, q_rows, kv_rows) != -np.inf
    shows = EXPRESSIONS[options.expression].shows if options.expression else None
    if shows is not None:
        see &= shows(pairs_of(options, (batch, head), options.group, q_rows, kv_rows))
    return see
