# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rows of one sequence each rank has.

A rank has segments, runs of consecutive rows, one behind the other in its memory by rising
position. All ranks know the segments of all.

Sources: zigzag is the order of Llama 3's context parallelism (Grattafiori et al., 2024, 3.3.2) and
of ring-flash-attention; dealing chunks by what a mask leaves of them that of MagiAttention (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fulmen

from ..errors import ArgumentError, whole
from .parts import Segment


@dataclass(frozen=True)
class Shards:
    """The segments of each rank; made by `contiguous`, `zigzag`, `balanced`, or by hand.

    Attributes:
        name: how it is called in `explain`.
        segments: of each rank, by rising position. Together they are the sequence.
    """

    name: str
    segments: tuple[tuple[Segment, ...], ...]

    @property
    def length(self) -> int:
        """Rows of the whole sequence."""
        return sum(self.rows(rank) for rank in range(len(self.segments)))

    def rows(self, rank: int) -> int:
        """Rows of a rank."""
        return sum(segment.rows for segment in self.segments[rank])

    @property
    def most_rows(self) -> int:
        """Rows of the rank that has most: buffers that travel have as many."""
        return max(self.rows(rank) for rank in range(len(self.segments)))

    def merged(self, groups: int) -> Shards:
        """The same with `groups` ranks, each with the segments of as many neighbours."""
        size = len(self.segments) // groups
        together = [
            sorted(segment for each in self.segments[size * g : size * (g + 1)] for segment in each)
            for g in range(groups)
        ]
        return Shards(self.name, tuple(tuple(joined(segments)) for segments in together))

    def check(self) -> Shards:
        """Refuses segments that are not each row of a sequence once."""
        at = 0
        for first, rows in sorted(segment for each in self.segments for segment in each):
            if rows < 1 or first != at:
                raise ArgumentError(
                    f"the shards have a segment of {rows} rows at position {first}, and the rows "
                    f"before it end at {at}; every row of the sequence belongs to one rank"
                )
            at = first + rows
        if any(list(each) != sorted(each) for each in self.segments):
            raise ArgumentError("the shards have segments of a rank that do not rise by position")
        return self


def joined(segments: Any) -> list[Segment]:
    """Neighbours that follow each other as one."""
    found: list[Segment] = []
    for first, rows in segments:
        if found and found[-1].first + found[-1].rows == first:
            found[-1] = Segment(found[-1].first, found[-1].rows + rows)
        elif rows:
            found.append(Segment(first, rows))
    return found


def _dealt(name: str, bounds: list[int], owners: list[int], ranks: int) -> Shards:
    """Shards of the chunks between bounds, by the rank that owns each."""
    of_rank: list[list[Segment]] = [[] for _ in range(ranks)]
    for owner, first, end in zip(owners, bounds, bounds[1:]):
        of_rank[owner].append(Segment(first, end - first))
    return Shards(name, tuple(tuple(joined(segments)) for segments in of_rank))


def _bounds(length: int, chunks: int) -> list[int]:
    return [length * chunk // chunks for chunk in range(chunks + 1)]


def _checked(length: Any, ranks: Any) -> tuple[int, int]:
    ranks = whole("ranks", ranks, 1)
    length = whole("length", length)
    if length < ranks:
        raise ArgumentError(
            f"a sequence of {length} rows is shared by {ranks} ranks; each has at least one row"
        )
    return length, ranks


def contiguous(length: int, ranks: int) -> Shards:
    """The sequence cut into one run of rows a rank: for masks without causal, and short windows.

    >>> contiguous(8, 2).segments
    ((Segment(first=0, rows=4),), (Segment(first=4, rows=4),))
    """
    length, ranks = _checked(length, ranks)
    return _dealt("contiguous", _bounds(length, ranks), list(range(ranks)), ranks)


def zigzag(length: int, ranks: int) -> Shards:
    """Chunks r and 2 * ranks - 1 - r of 2 * ranks: what causal leaves is the same for all ranks.

    >>> zigzag(8, 2).segments
    ((Segment(first=0, rows=2), Segment(first=6, rows=2)), (Segment(first=2, rows=4),))
    """
    length, ranks = _checked(length, ranks)
    owners = [*range(ranks), *reversed(range(ranks))]
    return _dealt("zigzag", _bounds(length, 2 * ranks), owners, ranks)


def balanced(
    length: int,
    ranks: int,
    *,
    chunk: int = 512,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
) -> Shards:
    """Chunks dealt so that each rank has as many, and of what masks leave as nearly as much.

    The heaviest chunk goes first, to the rank with the least work that has room. A chunk's work is
    the number of blocks of 128 rows and keys that `fulmen.block_map` does not call empty.

    Args:
        length: rows of the sequence.
        ranks: how many share it.
        chunk: rows of a chunk: a multiple of 128.
        causal, window, mask: as in `fulmen.attention`.

    Raises:
        fulmen.Error: as `fulmen.block_map`; too few chunks for the ranks.

    >>> balanced(1024, 2, chunk=128, causal=True).rows(0)
    512
    """
    length, ranks = _checked(length, ranks)
    chunk = whole("chunk", chunk, 1)
    if chunk % BLOCK:
        raise ArgumentError(f"chunk is {chunk}; a multiple of {BLOCK} is allowed")
    chunks = -(-length // chunk)
    if chunks < ranks:
        raise ArgumentError(
            f"{length} rows are {chunks} chunks of {chunk}, fewer than {ranks} ranks; chunk="
            f"{max(BLOCK, length // ranks // BLOCK * BLOCK)} makes more"
        )
    blocks = fulmen.block_map(length, length, size=BLOCK, causal=causal, window=window, mask=mask)
    of_block = (blocks.kinds != 0).sum(axis=(0, 1, 3))
    step = chunk // BLOCK
    work = [int(of_block[step * c : step * (c + 1)].sum()) for c in range(chunks)]
    room = [chunks // ranks + (rank < chunks % ranks) for rank in range(ranks)]
    load, owners = [0] * ranks, [0] * chunks
    for c in sorted(range(chunks), key=lambda c: -work[c]):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (load[r], r))
        owners[c] = rank
        load[rank] += work[c]
        room[rank] -= 1
    bounds = [*range(0, length, chunk), length]
    return _dealt("balanced", bounds, owners, ranks)


BLOCK = 128  # rows and keys of the blocks that are counted
BY_NAME = {"contiguous": contiguous, "zigzag": zigzag}
