# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A case: one named problem, as data. The catalogue is made of these and of nothing else.

A case says what is asked, never how it is computed: `problem.build` makes its arrays from its name
(the seed) and its fields, `run.run_case` judges an implementation by it. Arrays are described by
short words, listed where they are made: kinds of numbers in inputs, views in views, shapes that
broadcast as four letters or ones ("bhqk", "1h1k", "qk").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .scores import Scalars

CHECKS = (
    "rule", "same", "alone", "repeat", "merge", "differs", "refused", "moved", "appended",
    "indexed", "accumulate", "rounded",
)  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """What a case is called, and the tensors that it asks for."""

    name: str
    tags: tuple[str, ...] = ()
    note: str = ""  # what is special, or the public report
    dtype: str = "float32"
    kv_dtype: str = ""  # of k and v; "": as dtype. Others have 8 bits: quantised.MOST
    eight_bits: bool = False  # and of q; dtype is that of o
    scales: str = ""  # quantised.SCALES, CHANNEL, and ODD

    # shapes
    batch: int = 1
    heads: int = 2
    kv_heads: int = 0  # 0: as heads
    q_rows: int = 8
    kv_rows: int = -1  # -1: as q_rows
    dim: int = 16
    dim_v: int = 0  # 0: as dim

    # numbers and memory
    inputs: str = "normal"  # inputs.KINDS
    poison: str = ""  # inputs.POISONS: planted after the numbers are drawn
    views: tuple[tuple[str, str], ...] = ()  # (tensors, view): views.VIEWS
    out: str = ""  # "nan": the caller's own output, full of NaN


@dataclass(frozen=True)
class Caches:
    """Where the keys and values of caches lie, and where queries stand: pages."""

    page_size: int = 0  # 0: no pages; at least kv_rows: one page is the cache of one request
    pool: str = "heads_first"  # pages.POOLS: the memory of the two pools
    csr: bool = False  # the table is one list with offsets
    records: int = 0  # bytes of a row: records.LAYOUTS
    slots: bool = False  # the table has a slot for each key, and about a quarter of them has none
    shared: int = 0  # this many first keys are those of every request, on the same pages
    kv_shared: tuple[int, ...] = ()  # what the call says of `shared`: one number, or one a request
    topk: int = 0  # of the indexer: indexed
    kv_start: tuple[int, ...] = ()
    positions: str = ""  # problem.POSITIONS


@dataclass(frozen=True)
class Case(Caches, Scalars, Tensors):
    """One problem with a name. Fields that semantics.md defines have its meaning."""

    # options that are no scalars
    window: Any = None  # None, (left, right) or an int, as in fulmen.attention
    masks: tuple[Any, ...] = ()  # ("bool", shape, share), ("chunks", n): problem.masks_of
    bias: str = ""  # its shape; a type may follow: "1h1k float32"; and a kind: "qk float32 lowest"
    alibi: str = ""  # "h" or "bh"
    sinks: str = ""  # "normal", "low", "high", "minus_inf"
    q_lengths: tuple[int, ...] = ()
    kv_lengths: tuple[int, ...] = ()
    q_segments: tuple[Any, ...] = ()  # of each request, or of all: (first row, rows, position), ..
    kv_segments: tuple[Any, ...] = ()
    q_packed: tuple[int, ...] = ()  # lengths of packed sequences; then q_rows is their sum
    kv_packed: tuple[int, ...] = ()
    q_tail: int = 0  # rows after the last packed sequence
    kv_tail: int = 0
    offsets: str = "int32"  # the type of cu_q and cu_kv
    max_rows: int = 0  # 0: not given; else max_q and max_kv are this much above the true ones
    expression: str = ""  # expressions.EXPRESSIONS
    dropout_p: float = 0.0
    rng: tuple[int, int] = (0, 0)
    precision: str = ""  # of products: "" for the default

    # what is judged
    gradients: tuple[str, ...] = ("q", "k", "v")  # "bias" and "sinks" are added where they exist
    fixed: tuple[str, ...] = ()  # but for these
    dlse: bool = False
    check: str = "rule"  # CHECKS
    need_each: bool = False  # each gradient is asked for alone as well: checks.each_alone
    lse_only: bool = False  # backward takes lse instead of stats
    finite_gradients: bool = False  # scores beyond 1e6: gradients are finite, not more
    exact: bool = False  # one visible key: o = v[j]
    others: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # see run
    parts: tuple[int, ...] = ()  # keys of each part that is merged, or accumulated
    repeat: int = 0  # this many batch entries, all the one of the case, with stride 0
    out_dtype: str = ""  # of o

    def __post_init__(self) -> None:
        """Fills what follows from other fields, and refuses what no case can mean."""
        if self.q_packed or self.kv_packed:
            self._put("batch", len(self.q_packed))
            self._put("q_rows", sum(self.q_packed) + self.q_tail)
            if not self.page_size:
                self._put("kv_rows", sum(self.kv_packed) + self.kv_tail)
        if self.kv_rows < 0:
            self._put("kv_rows", self.q_rows)
        if self.eight_bits:
            self._put("out_dtype", self.dtype)
        self._put("kv_heads", self.kv_heads or self.heads)
        self._put("dim_v", self.dim_v or self.dim)
        if self.page_size and not self.kv_lengths:
            self._put("kv_lengths", (self.kv_rows,) * self.batch)
        if len(self.q_packed) != len(self.kv_packed) and not self.page_size:
            raise ValueError(f"{self.name}: {len(self.q_packed)} and {len(self.kv_packed)} lengths")
        if self.poison and any(view.startswith("same") for _, view in self.views):
            raise ValueError(f"{self.name}: {self.poison} would be repeated by a stride of 0")
        if self.check not in CHECKS:
            raise ValueError(f"{self.name}: no check is called {self.check}")

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def packed(self) -> bool:
        """Whether sequences follow each other in one tensor."""
        return bool(self.q_packed)

    @property
    def needs(self) -> tuple[str, ...]:
        """The gradients that are judged, in the words of fulmen.attention_backward."""
        if not self.gradients:
            return ()
        extra = [
            name for name in ("bias", "sinks") if getattr(self, name) and name not in self.fixed
        ]
        return (*self.gradients, *(name for name in extra if name not in self.gradients))

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults: what a table shows."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: found[f.name] for f in fields(self) if found[f.name] != f.default}
