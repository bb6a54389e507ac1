# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid of scores and masks of a caller's own, as data.

A variant is said three times: as a text, as the option that means the same where there is one, and
as functions of FlexAttention, which the truth calls too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import fulmen
from fulmen.masks import blocks, documents, expression, prefix

from .cells import DOCUMENT, EVERYTHING, WIDTH, Asked, Cell
from .loading import MissingError

PREFIX = 4096  # keys that all rows see
REACH = 128  # positions beyond which a relative table says the same
CAP = 30.0
BLOCK = 128  # rows and keys of a block of lists
DENSITIES = {"blocks-0.1": 0.1, "blocks-0.25": 0.25, "blocks-0.5": 0.5}
CHUNKS = 8  # of a causal sequence, each a segment of rows and of keys
VARIANTS = (
    "identity", "alibi", "softcap", "documents", "prefix", "relative", "segments", *DENSITIES,
)  # fmt: skip
Keywords = dict[str, Any]
ROWS, DIMS, DTYPE = 16384, (128, 64), "bfloat16"


@dataclass(frozen=True)
class ExpressionCell(Cell):
    """One sequence; `option` is the variant."""

    @property
    def listed(self) -> int:
        """Blocks of keys that a block of rows sees, of lists of blocks."""
        return max(1, round(DENSITIES[self.option] * (self.rows // BLOCK)))

    @property
    def visible_share(self) -> float:
        """The pairs that a mask leaves, of all."""
        if self.option in DENSITIES:
            return self.listed / (self.rows // BLOCK)
        if self.option == "documents":
            whole, rest = divmod(self.rows, DOCUMENT)
            return (whole * DOCUMENT**2 + rest**2) / self.rows**2
        if self.option == "prefix":
            return sum(max(i + 1, min(PREFIX, self.rows)) for i in range(self.rows)) / self.rows**2
        if self.option == "segments":
            return (self.rows + 1) / (2 * self.rows)
        return 1.0

    @property
    def flops(self) -> float:
        return super().flops * self.visible_share

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.rows,) * self.batch

    def lists(self) -> list[list[list[int]]]:
        """Blocks of keys for each head and block of rows, drawn; the same in every run."""
        draw = random.Random(self.name)
        blocks = range(self.rows // BLOCK)
        return [[sorted(draw.sample(blocks, self.listed)) for _ in blocks]
                for _ in range(self.heads)]  # fmt: skip


@dataclass
class Captures:
    """The inputs of a cell as `Tensors` has them, beside what its variant reads."""

    q: Any
    k: Any
    v: Any
    do: Any
    slope: Any  # (head,) float32
    document: Any  # (row,) int32
    table: Any  # (head, 2 REACH + 1) float32
    segments: Any  # (CHUNKS, 3) int32: the rows and keys of a sequence in chunks
    lists: Any  # (1, head, block of rows, entry) int32; None without lists


def as_text(cell: ExpressionCell, t: Captures) -> Keywords:
    """The variant in the language of `fulmen.score`; lists of blocks are no text."""
    if cell.option in DENSITIES:
        return {"mask": blocks(t.lists, BLOCK)}
    near = f"clamp(j - p, -{REACH}, {REACH}) + {REACH}"
    known: dict[str, Callable[[], Keywords]] = {
        "identity": lambda: {"score": "s"},
        "alibi": lambda: {"score": fulmen.score("s - slope[h] * abs(p - j)", slope=t.slope)},
        "softcap": lambda: {"score": f"{CAP} * tanh(s / {CAP})"},
        "documents": lambda: {"mask": expression("doc[i] == doc[j]", doc=t.document)},
        "prefix": lambda: {"mask": f"j <= p or j < {PREFIX}"},
        "relative": lambda: {"score": fulmen.score(f"s + table[h, {near}]", table=t.table)},
        "segments": lambda: {
            "causal": True, "q_segments": t.segments, "kv_segments": t.segments,
        },
    }  # fmt: skip
    return known[cell.option]()


def as_option(cell: ExpressionCell, t: Captures) -> Keywords:
    """The option that means the same.

    Raises:
        MissingError: there is none.
    """
    known: dict[str, Callable[[], Keywords]] = {
        "alibi": lambda: {"alibi_slopes": t.slope},
        "softcap": lambda: {"softcap": CAP},
        "documents": lambda: {"mask": documents(t.document[None])},
        "prefix": lambda: {"causal": True, "mask": prefix(PREFIX)},
        "segments": lambda: {"causal": True},
    }
    if cell.option not in known:
        raise MissingError(f"no option means {cell.option}")
    return known[cell.option]()


def score_mod(cell: ExpressionCell, t: Captures) -> Callable[..., Any] | None:
    """The variant's score as FlexAttention has it."""
    import torch

    slope, table = t.slope, t.table
    known: dict[str, Callable[..., Any]] = {
        "identity": lambda s, b, h, i, j: s,
        "alibi": lambda s, b, h, i, j: s - slope[h] * (i - j).abs(),
        "softcap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
        "relative": lambda s, b, h, i, j: s + table[h, torch.clamp(j - i, -REACH, REACH) + REACH],
    }
    return known.get(cell.option)


def mask_mod(cell: ExpressionCell, t: Captures) -> Callable[..., Any] | None:
    """The variant's mask as FlexAttention has it; of lists of blocks for the truth alone."""
    document = t.document
    known: dict[str, Callable[..., Any]] = {
        "documents": lambda b, h, i, j: document[i] == document[j],
        "prefix": lambda b, h, i, j: (j <= i) | (j < PREFIX),
        "segments": lambda b, h, i, j: j <= i,
    }
    return known.get(cell.option)


@dataclass(frozen=True)
class ExpressionGrid:
    """The variants, forward and backward, by head dim."""

    name: str
    backend: str = "cuda"

    def cells(self, asked: Asked = EVERYTHING) -> Iterator[ExpressionCell]:
        """Cells in order; lists of blocks want rows that their blocks divide."""
        choices = product(asked.dims or DIMS, asked.rows or (ROWS,), VARIANTS)
        for dim, rows, variant in choices:
            heads = max(WIDTH // dim, 1)
            for op in ("forward", "backward"):
                if variant not in DENSITIES or rows % BLOCK == 0:
                    yield ExpressionCell(
                        self.name, op, asked.dtype or DTYPE, 1, heads, heads, rows, dim, False,
                        option=variant,
                    )  # fmt: skip


EXPRESSION_GRIDS = {grid.name: grid for grid in (ExpressionGrid("expressions"),)}
