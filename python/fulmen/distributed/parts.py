# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention of some rows of a sequence to some of its keys, as calls on consecutive rows and keys.

Row i and key j have positions in the whole sequence. Of a segment of rows from position a on and a
segment of keys from position b on, row x of the one is a + x and key y of the other b + y. What
causal and window leave is a band, i - left <= j <= i + right; in the two segments it is the band
x + d - left <= y <= x + d + right with d = a - b, which a call has as its window once rows and keys
that no pair of the band touches are cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]  # first and end, in the memory of a rank


class Segment(NamedTuple):
    """Consecutive rows of the sequence."""

    first: int  # position of the first
    rows: int


class Band(NamedTuple):
    """Which keys j a row i sees: i - left <= j <= i + right, None for no limit."""

    left: int | None = None
    right: int | None = None
    always: int = 0  # keys below it are seen whatever causal says ...
    always_right: int | None = None  # ... up to this limit of the window

    @property
    def is_causal_alone(self) -> bool:
        return self.right == 0 and self.left is None and not self.always


class Heads(NamedTuple):
    """Query heads of a call, of all that there are, and its key/value heads."""

    q: Span
    kv: Span
    is_all: bool

    def of(self, x: Any) -> Any:
        """Those of an array (head,) or (batch, head)."""
        return x if self.is_all else x[..., self.q[0] : self.q[1]]


class Part(NamedTuple):
    """One call: rows and keys in the memory of the rank, and what hides pairs of them."""

    rows: Span
    keys: Span
    distance: int | None  # position of the first row - that of the first key; None: several
    options: tuple[tuple[str, Any], ...]  # causal, window, alignment of the call

    @property
    def is_full(self) -> bool:
        return not self.options


def parts_of(
    rows: Sequence[Segment], keys: Sequence[Segment], band: Band, join: bool = True
) -> list[Part]:
    """The calls whose results merge to the attention of `rows` to `keys`.

    Args:
        rows, keys: segments by rising position, in memory one behind the other.
        band: what is seen.
        join: segments may share a call that sees all of them, or that is causal among themselves.
    """
    if join and band.is_causal_alone and len(rows) > 1 and list(rows) == list(keys):
        every = (0, sum(segment.rows for segment in rows))  # rows and keys rise alike
        return [Part(every, every, None, (("causal", True), ("alignment", "top_left")))]
    found = []
    row = 0
    for first, count in rows:
        key = 0
        for piece, right in _pieces(keys, band):
            part = _cut((first, row, count), (piece.first, key, piece.rows), band.left, right)
            key += piece.rows
            if part is not None:
                found.append(part)
        row += count
    return _joined(found) if join else found


def _pieces(keys: Sequence[Segment], band: Band) -> Iterator[tuple[Segment, int | None]]:
    """The segments of keys, cut where those end that are always seen, with the limit of each."""
    for first, rows in keys:
        inside = min(max(band.always - first, 0), rows)
        if inside:
            yield Segment(first, inside), band.always_right
        if inside < rows:
            yield Segment(first + inside, rows - inside), band.right


def _cut(
    rows: tuple[int, int, int], keys: tuple[int, int, int], left: int | None, right: int | None
) -> Part | None:
    """The call of one segment of rows and one of keys, each (position, place, count)."""
    (a, row, n), (b, key, m) = rows, keys
    if right is not None:
        skipped = max(0, b - a - right)  # rows before the first that sees the first key
        a, row, n = a + skipped, row + skipped, n - skipped
    if left is not None:
        skipped = max(0, a - left - b)  # keys before the first that the first row sees
        b, key, m = b + skipped, key + skipped, m - skipped
    if n <= 0 or m <= 0:
        return None
    d = a - b
    if right is not None:
        m = min(m, n + d + right)
    if left is not None:
        n = min(n, m - d + left)
    above = None if right is None or d + right >= m - 1 else d + right
    below = None if left is None or left - d >= n - 1 else left - d
    return Part((row, row + n), (key, key + m), d, tuple(_band_options(n, m, below, above)))


def _band_options(
    n: int, m: int, below: int | None, above: int | None
) -> Iterator[tuple[str, Any]]:
    """x - below <= y <= x + above as options of a call of n rows and m keys; none: all is seen."""
    if below is None and above is None:
        return
    shift = m - n if above == m - n else 0  # causal from the last row and key, as kernels like it
    if above is not None and above == shift:
        yield "causal", True
        if below is not None:
            yield "window", (below + shift, 0)
    else:
        yield "window", (below, above)
    yield "alignment", "bottom_right" if shift else "top_left"


def _joined(parts: list[Part]) -> list[Part]:
    """Parts that see all of the same keys, or of the same rows, and lie side by side, as one."""
    found: list[Part] = []
    for part in parts:
        for index, other in enumerate(found):
            whole = _side_by_side(other, part)
            if whole is not None:
                found[index] = whole
                break
        else:
            found.append(part)
    return found if len(found) == len(parts) else _joined(found)


def _side_by_side(one: Part, other: Part) -> Part | None:
    if not (one.is_full and other.is_full):
        return None
    if one.rows == other.rows and one.keys[1] == other.keys[0]:
        return one._replace(keys=(one.keys[0], other.keys[1]), distance=None)
    if one.keys == other.keys and one.rows[1] == other.rows[0]:
        return one._replace(rows=(one.rows[0], other.rows[1]), distance=None)
    return None


def overlap(parts: Sequence[Part]) -> bool:
    """Whether a row is in two parts."""
    spans = sorted(part.rows for part in parts)
    return any(after[0] < before[1] for before, after in zip(spans, spans[1:]))


def gaps(spans: Sequence[Span], begin: int, end: int) -> Iterator[Span]:
    """What between begin and end is in none of the spans."""
    at = begin
    for a, b in sorted(spans):
        if at < min(a, end):
            yield at, min(a, end)
        at = max(at, b)
    if at < end:
        yield at, end


def pairs_of(part: Part) -> int:
    """Visible pairs of a part, as its own options hide them."""
    n, m = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
    options = dict(part.options)
    shift = m - n if options.get("alignment") == "bottom_right" else 0
    left, right = options.get("window", (None, None))
    if options.get("causal"):
        right = 0
    below = n if left is None else left - shift
    above = m if right is None else right + shift
    return _at_most(n, m, above) - _at_most(n, m, -below - 1)


def _at_most(n: int, m: int, above: int) -> int:
    """How many (x, y) of n rows and m keys have y <= x + above."""
    if above < 0:
        n, above = max(0, n + above), 0
    growing = min(n, max(0, m - 1 - above))  # rows that see above + 1, above + 2, ... keys
    return growing * (above + 1) + growing * (growing - 1) // 2 + (n - growing) * m
