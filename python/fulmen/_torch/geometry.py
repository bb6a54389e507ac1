# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which keys a block of query rows sees, and how far they are, in tensors: reference.py reads it.

No length is read on the host. What masks mean is written in fulmen.masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..masks import hidden

if TYPE_CHECKING:
    from .reference import Meaning


class Geometry(NamedTuple):
    """A block of rows against all keys. Axes (batch or 1, head or 1, row of the block, kv_row)."""

    batch: int
    rows: slice
    visible: Tensor
    distance: Tensor  # |i + shift - j|
    q_position: Tensor  # (row of the block) index in its own sequence
    kv_position: Tensor  # (kv_row) likewise
    drawn: tuple[Tensor, Tensor]  # row and key as dropout counts them, (batch or 1, 1, row, kv_row)
    q_sequence: Any  # packed: (row of the block) which sequence; else None

    def part(self, x: Tensor) -> Tensor:
        """The part of a mask or bias that belongs to a block, with four axes."""
        x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
        if self.q_sequence is None:
            return x[:, :, self.rows] if x.shape[-2] > 1 else x
        if x.shape[-2] > 1:  # packed: indexed by the positions in a sequence
            x = x[:, :, self.q_position.clamp(0, x.shape[-2] - 1)]
        if x.shape[-1] > 1:
            x = x[:, :, :, self.kv_position.clamp(0, x.shape[-1] - 1)]
        return x


class _Side(NamedTuple):
    """Rows or keys, each broadcastable to (batch, head, row, kv_row)."""

    position: Tensor  # in its own sequence
    length: Tensor
    sequence: Any


def _tall(x: Tensor) -> Tensor:
    return x.reshape(*x.shape, 1)


def _packed_side(index: Tensor, offsets: Tensor) -> _Side:
    offsets = offsets.to(torch.int64)
    sequence = torch.bucketize(index, offsets[1:], right=True)
    inside = sequence < offsets.shape[0] - 1
    own = sequence.clamp(max=offsets.shape[0] - 2)
    length = torch.where(inside, offsets[own + 1] - offsets[own], 0)
    position = index - offsets[own]
    return _Side(position, length, torch.where(inside, sequence, -1))


def _listed(lists: Tensor, options: Any, i: Tensor, j: Tensor, sequence: Any) -> Tensor:
    """Whether lists of blocks name the block of each pair: (batch or 1, lists, row, kv_row)."""
    lists = lists.to(torch.int64).reshape((1,) * (4 - lists.dim()) + tuple(lists.shape))
    row = (i // options.block_q).clamp(max=max(lists.shape[2] - 1, 0))
    if sequence is None:
        lists = lists[:, :, row]
    else:  # packed: (row, lists, entry)
        own = sequence.clamp(min=0) if lists.shape[0] > 1 else torch.zeros_like(sequence)
        lists = lists[own, :, row].transpose(0, 1).unsqueeze(0)
    key = j // options.block_kv
    named = torch.zeros(*lists.shape[:3], key.shape[0], dtype=torch.bool, device=lists.device)
    for entry in lists.unbind(3):
        named |= entry.unsqueeze(3) == key
    return named


def _standing(segments: Any, rows: Tensor, sequence: Any) -> Tensor:
    """Where rows of a call stand by segments, -1 where none has them: (batch or 1, 1, row)."""
    segments = segments.to(torch.int64).reshape(-1, *segments.shape[-2:])
    if sequence is None:
        own = segments.unsqueeze(1)  # (batch or 1, 1, segment, 3)
    else:  # packed: (1, row, segment, 3)
        own = segments[sequence.clamp(min=0) % segments.shape[0]].unsqueeze(0)
    first, count, position = own.unbind(-1)
    within = rows.view(1, -1, 1) - first
    found = torch.where((within >= 0) & (within < count), position + within, -1)
    return found.amax(-1).unsqueeze(1)


def geometry_of(
    arrays: Any, meaning: Meaning, batch: int, num_q: int, num_kv: int, rows: slice
) -> Geometry:
    """The geometry of one block of rows."""
    device = arrays.q.device
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(num_kv, device=device)
    if arrays.cu_q is not None:
        q_side, kv_side = _packed_side(i, arrays.cu_q), _packed_side(j, arrays.cu_kv)
        kv_offsets = arrays.cu_kv.to(torch.int64)
        own = q_side.sequence.clamp(min=0)
        own_keys = kv_offsets[own + 1] - kv_offsets[own]
        q_position, kv_position = q_side.position, kv_side.position
        visible = (_tall(q_side.sequence) == kv_side.sequence) & _tall(q_side.sequence >= 0)
        shift = _tall(own_keys - q_side.length)
    else:
        q_position, kv_position = i, j
        q_len: Any = num_q if arrays.q_lengths is None else arrays.q_lengths.view(-1, 1, 1, 1)
        kv_len: Any = num_kv if arrays.kv_lengths is None else arrays.kv_lengths.view(-1, 1, 1, 1)
        visible = (_tall(i) < q_len) & (j < kv_len)
        shift = kv_len - q_len
    if meaning.is_top_left:
        shift = 0
    level = _tall(q_position) + shift  # the key that a row is level with
    key, drawn = kv_position, _tall(q_position)
    if arrays.q_segments is not None:
        is_packed = arrays.cu_q is not None
        level = _tall(
            _standing(arrays.q_segments, q_position, q_side.sequence if is_packed else None)
        )
        visible, drawn = visible & (level >= 0), level
    if arrays.kv_segments is not None:
        sequence = kv_side.sequence if arrays.cu_q is not None else None
        key = _standing(arrays.kv_segments, kv_position, sequence).unsqueeze(2)
        visible = visible & (key >= 0)
    for part in hidden(meaning.options, level, key):
        visible = visible & ~part
    if arrays.q_ids is not None:
        q_ids = _tall(arrays.q_ids[..., rows])
        kv_ids = arrays.kv_ids if arrays.kv_ids is not None else arrays.q_ids
        same = q_ids == kv_ids.reshape(*kv_ids.shape[:-1], 1, kv_ids.shape[-1])
        visible = visible & (same.unsqueeze(1) if same.dim() == 3 else same)
    visible = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    if arrays.blocks is not None:
        layout = meaning.layout
        heads = arrays.q.shape[layout.index("h")] if "h" in layout else 1
        sequence = q_side.sequence if arrays.cu_q is not None else None
        listed = _listed(arrays.blocks, meaning.options, q_position, kv_position, sequence)
        visible = visible & listed.repeat_interleave(heads // listed.shape[1], 1)
    where = Geometry(
        batch,
        rows,
        visible,
        (level - key).abs(),
        q_position,
        kv_position,
        (drawn, key),
        q_side.sequence if arrays.cu_q is not None else None,
    )
    if arrays.mask is not None:
        where = where._replace(visible=visible & where.part(arrays.mask))
    return where
