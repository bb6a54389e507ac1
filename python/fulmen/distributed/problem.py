# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a call on the whole sequence asks for, said again for each call on parts of it.

Masks, ALiBi and texts speak of positions in the whole sequence: causal and window become the band
of a part, document numbers are those of its rows and keys, and a text reads the positions of its
rows and keys, and the numbers of its heads, from arrays. With dropout, whose pattern is that of
positions too, a call has all rows and keys that are here, and segments that say where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import masks
from ..errors import ArgumentError, ShapeError, UnsupportedError
from ..expressions import Score
from ..keywords import KEYWORDS, Caches, KvLengths, Offsets, Placement, Segments
from ..options import check_keywords, window_sides
from .dropout import DROPOUT, dropout_of, segments_of
from .parts import Band, Heads, Part, Segment, parts_of

# What speaks of rows and keys, and is said again for each part; what else is read is passed on.
_OF_PAIRS = {
    "causal", "window", "alignment", "mask", "score", "alibi_slopes", "sinks", *DROPOUT,
}  # fmt: skip
_DOCUMENTS = (
    "mask=fulmen.masks.documents(ids) has packed documents, and hides padding by its number"
)
_REFUSED = {
    "bias": "score= a text that reads an array has gradients and needs no array of all pairs",
    "q_lengths": _DOCUMENTS,
    **dict.fromkeys((*Offsets.__annotations__, *KvLengths.__annotations__), _DOCUMENTS),
    **dict.fromkeys(
        (*Caches.__annotations__, *Placement.__annotations__, *Segments.__annotations__,
         "slots", "max_q", "max_kv", "layout", "q_scale", "k_scale", "v_scale"),
        "fulmen.attention on one device reads it",
    ),
}  # fmt: skip
_PLAIN = KEYWORDS - _REFUSED.keys() - _OF_PAIRS
_MASKS = {
    "mask": "a boolean array of all pairs; mask= a text that reads an array of rows or keys",
    "blocks": "fulmen.masks.blocks; mask= a text says the same",
    "tree": "fulmen.masks.tree, which is for drafts",
}


def refuse_unread(options: dict[str, Any]) -> None:
    """Refuses what context parallelism does not read, each with what does instead."""
    check_keywords(options)
    for name, x in options.items():
        is_off = x is None or (isinstance(x, (bool, int, float)) and not x)
        if name in _REFUSED and not is_off:
            raise UnsupportedError(
                f"{name} is given to context parallelism and not read: {_REFUSED[name]}"
            )


class Side:
    """Rows, or keys, in the memory of a rank: their positions and document numbers there."""

    def __init__(self, segments: Sequence[Segment], ids: Tensor | None, device: Any) -> None:
        self.segments, self.device = tuple(segments), device
        self.rows = sum(segment.rows for segment in segments)
        self.ids = None if ids is None else ids.to(device).index_select(-1, self.positions)

    @property
    def positions(self) -> Tensor:
        return positions_of(self.segments, self.device)


@lru_cache(maxsize=32)  # a copy to a GPU makes the host wait for it
def positions_of(segments: tuple[Segment, ...], device: Any) -> Tensor:
    """(row,) int64: where the rows of segments are in the sequence."""
    runs = [torch.arange(first, first + rows) for first, rows in segments]
    return torch.cat(runs).to(device) if runs else torch.zeros(0, dtype=torch.int64, device=device)


class Problem:
    """One call of `ContextParallel.attention`, without its q, k and v."""

    def __init__(self, options: dict[str, Any], length: int, device: Any) -> None:
        refuse_unread(options)
        self.length, self.device = length, device
        self.plain = {name: x for name, x in options.items() if name in _PLAIN and x is not None}
        self.sinks: Tensor | None = options.get("sinks")
        self.slopes: Tensor | None = options.get("alibi_slopes")
        score = options.get("score")
        self.score = Score(score) if isinstance(score, str) else score
        mask = options.get("mask")
        found = {} if mask is None else masks.split(mask)
        for name, what in _MASKS.items():
            if name in found:
                raise UnsupportedError(f"mask holds {what}: not read by context parallelism")
        self.texts: tuple[masks.Expression, ...] = found.get("expressions", ())
        self.band = _band(options, found.get("prefix", 0))
        self.prefix = found.get("prefix", 0)
        self.q_ids, self.kv_ids = self._documents(found)
        self.dropped = dropout_of(options)
        self._sides: dict[Any, Side] = {}

    @property
    def captures(self) -> dict[str, Any]:
        """The arrays that texts of the caller's read."""
        every = self.texts if self.score is None else (self.score, *self.texts)
        return {name: x for text in every for name, x in text.captures.items()}

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """Those of them that have gradients."""
        return {
            name: x for name, x in self.captures.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }  # fmt: skip

    @property
    def may_join(self) -> bool:
        """Whether parts may span segments: ALiBi is cheaper where a part has one distance."""
        return self.slopes is None

    def side(self, segments: Sequence[Segment], are_keys: bool) -> Side:
        key = (tuple(segments), are_keys)
        if key not in self._sides:
            ids = self.kv_ids if are_keys else self.q_ids
            self._sides[key] = Side(segments, ids, self.device)
        return self._sides[key]

    def with_captures(self, captures: dict[str, Any]) -> None:
        """Puts other arrays in the place of those that texts read, by name."""

        def replaced(x: Any) -> Any:
            own = {name: captures.get(name, value) for name, value in x.captures.items()}
            return type(x)(x.text, own)

        self.score = None if self.score is None else replaced(self.score)
        self.texts = tuple(replaced(text) for text in self.texts)

    def parts(self, rows: Side, keys: Side) -> list[Part]:
        """The calls of rows on keys that are here."""
        found = parts_of(rows.segments, keys.segments, self.band, self.may_join)
        if self.dropped and found:
            return [Part((0, rows.rows), (0, keys.rows), None, ())]
        return found

    def _by_segments(self, rows: Side, keys: Side) -> dict[str, Any]:
        """Those of a call of all rows and keys that are here: i and j are positions in it."""
        found = {
            **self.plain, **self.dropped,
            "q_segments": segments_of(rows.segments, self.device),
            "kv_segments": segments_of(keys.segments, self.device),
        }  # fmt: skip
        parts: list[Any] = [masks.prefix(self.prefix)] if self.prefix else []
        if rows.ids is not None and keys.ids is not None:
            parts.append(masks.documents(rows.ids, keys.ids))
        place = _Place(rows.positions, keys.positions, Heads((0, 0), (0, 0), True), self.length)
        if self.score is not None:
            found["score"] = place.of(self.score, ("q_len", "kv_len"))
        parts += [place.of(text, ("q_len", "kv_len")) for text in self.texts]
        return {**found, "mask": tuple(parts)} if parts else found

    def options(self, part: Part, rows: Side, keys: Side, heads: Heads) -> dict[str, Any]:
        """Those of the call of a part, without sinks."""
        if self.dropped:
            return self._by_segments(rows, keys)
        found = {**self.plain, **dict(part.options)}
        r, k = slice(*part.rows), slice(*part.keys)
        parts: list[Any] = []
        if rows.ids is not None and keys.ids is not None:
            parts.append(masks.documents(rows.ids[..., r], keys.ids[..., k]))
        score = self.score
        slopes = None if self.slopes is None else heads.of(self.slopes)
        if slopes is not None and part.distance == _distance(part):
            found["alibi_slopes"] = slopes
            slopes = None
        elif slopes is not None:
            found.pop("alibi_slopes", None)
            score = _with_slopes(score, slopes)
        place = _Place(rows.positions[r], keys.positions[k], heads, self.length)
        is_own = part.distance == 0 and rows.segments[0].first == 0 and heads.is_all
        is_own = is_own and part.rows == part.keys == (0, self.length)
        if score is not None:
            found["score"] = score if is_own else place.of(score)
        for text in self.texts:
            parts.append(text if is_own else place.of(text))
        if parts:
            found["mask"] = tuple(parts)
        return found

    def _documents(self, found: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of all rows and keys that must be equal, chunks among them."""
        sides = []
        for name in ("q_ids", "kv_ids"):
            ids = found.get(name)
            if ids is not None:
                ids = torch.as_tensor(ids)
                if ids.dim() not in (1, 2) or ids.shape[-1] != self.length:
                    raise ShapeError(
                        f"{name} has shape {tuple(ids.shape)}; one number for each of the "
                        f"{self.length} rows of the whole sequence is expected"
                    )
            size = found.get("chunk", 0)
            if size:
                place = torch.arange(self.length) // size
                count = self.length // size + 1
                ids = place if ids is None else ids.to(torch.int64) * count + place.to(ids.device)
            sides.append(ids)
        return sides[0], sides[1]


def _band(options: dict[str, Any], prefix: int) -> Band:
    causal = bool(options.get("causal"))
    sides = window_sides(options.get("window"), causal)
    left, right = (None if sides[f"window_{side}"] < 0 else sides[f"window_{side}"]
                   for side in ("left", "right"))  # fmt: skip
    if causal and right:
        raise ArgumentError(f"window has right side {right} with causal; 0 or None is allowed")
    if prefix and not causal:
        raise ArgumentError("masks.prefix needs causal=True: without it nothing is hidden")
    return Band(left, 0 if causal else right, prefix, right)


def _distance(part: Part) -> int:
    """The distance that ALiBi of the part's own call counts from."""
    is_level = dict(part.options).get("alignment", "bottom_right") == "top_left"
    n, m = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
    return 0 if is_level else m - n


_SLOPES = "fulmen_slopes"


def _with_slopes(score: Score | None, slopes: Tensor) -> Score:
    """A score behind ALiBi; its rows and keys are put in by `_Place`."""
    of_head = "b, fulmen_head" if slopes.dim() == 2 else "fulmen_head"
    term = f"s - {_SLOPES}[{of_head}] * abs(i - j)"
    if score is None:
        return Score(term, {_SLOPES: slopes})
    return Score(_replaced(score.text, {"s": f"({term})"}), {**score.captures, _SLOPES: slopes})


def _replaced(text: str, words: dict[str, str]) -> str:
    """A text with other words in the place of names; $names are numbers of the caller's."""
    return re.sub(r"(?<![$\w.])([A-Za-z_]\w*)", lambda x: words.get(x[1], x[1]), text)


class _Place(NamedTuple):
    """Where the rows, keys and heads of a call are among all."""

    rows: Tensor
    keys: Tensor
    heads: Heads
    length: int

    def of(self, text: Any, only: Sequence[str] = ()) -> Any:
        """A text of the whole as one of this call; only: in which these words alone differ."""
        captures = dict(text.captures)
        one = positions_of((Segment(self.length, 1),), self.rows.device)
        kinds = {
            "i": ("fulmen_rows", self.rows, "[i]"),
            "p": ("fulmen_rows", self.rows, "[i]"),
            "j": ("fulmen_keys", self.keys, "[j]"),
            "q_len": ("fulmen_length", one, ""),
            "kv_len": ("fulmen_length", one, ""),
        }
        if not self.heads.is_all:
            spans = {"h": self.heads.q, "hk": self.heads.kv}
            for name, span in spans.items():
                run = (Segment(span[0], span[1] - span[0]),)
                numbers = positions_of(run, self.rows.device)
                kinds[name] = (f"fulmen_{name}_numbers", numbers, f"[{name}]")
        used = set(re.findall(r"(?<![$\w.])([A-Za-z_]\w*)", text.text))
        words = {"fulmen_head": "h"}  # of the call itself: its slopes are those of its heads
        for name in used & (set(only) if only else kinds.keys()):
            array, values, index = kinds[name]
            words[name] = array + index
            captures[array] = values
        return type(text)(_replaced(text.text, words), captures)
