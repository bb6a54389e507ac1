# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Masks as values: what a query may see, said without a matrix.

Each is one small frozen object for `mask=` of the attention calls, alone or in a tuple (all must
hold), beside a boolean array if need be. They cost no quadratic memory; `fulmen.dense_mask` prints
the matrix that they mean. A value says in `options` which options and arrays of a call it stands
for: nothing else in the package names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError, DTypeError, whole
from .errors import text as errors_text

__all__ = [
    "Blocks", "Chunks", "Documents", "Expression", "Prefix", "Tree",
    "blocks", "chunks", "documents", "expression", "prefix", "tree",
]  # fmt: skip


@dataclass(frozen=True)
class Prefix:
    """The first `n` keys are visible to every row, before the causal diagonal too."""

    n: int

    @property
    def options(self) -> dict[str, Any]:
        """By the names of the schema."""
        return {"prefix": whole("n of masks.prefix", self.n)}


@dataclass(frozen=True, eq=False)
class Documents:
    """A query sees only the keys with the same id; `kv_ids` None: the ids of the queries."""

    q_ids: Any  # (q_row,) or (batch, q_row), int32 or int64; packed (total_q,)
    kv_ids: Any = None  # (kv_row,) or (batch, kv_row) likewise

    @property
    def options(self) -> dict[str, Any]:
        """By the names of the schema."""
        return {"q_ids": self.q_ids, "kv_ids": self.q_ids if self.kv_ids is None else self.kv_ids}


@dataclass(frozen=True)
class Chunks:
    """A query sees only the keys of its own chunk of `size` positions."""

    size: int

    @property
    def options(self) -> dict[str, Any]:
        """By the names of the schema."""
        size = whole("size of masks.chunks", self.size)
        if size < 1:
            raise ArgumentError(f"masks.chunks has size {size}; at least 1 is allowed")
        return {"chunk": size}


@dataclass(frozen=True, eq=False)
class Tree:
    """Drafts of a tree: bit t of a row's word says whether it sees key kv_len - q_len + t."""

    words: Any  # (q_row,) or (batch, q_row), int64; packed (total_q,)

    @property
    def options(self) -> dict[str, Any]:
        """By the names of the schema."""
        words = self.words
        if isinstance(words, (list, tuple)):
            words = np.array(words, np.uint64 if _any_above(words) else np.int64)
        if isinstance(words, np.ndarray) and words.dtype == np.uint64:
            words = words.view(np.int64)
        return {"tree": words}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Lists of blocks; made by `fulmen.masks.blocks`."""

    lists: Any  # (batch or 1, head or kv_head or 1, q_block, entry), int32 or int64; -1: none
    size: tuple[int, int]  # query rows and keys of a block

    @property
    def options(self) -> dict[str, Any]:
        """By the names of the schema."""
        return {"blocks": self.lists, "block_q": self.size[0], "block_kv": self.size[1]}


@dataclass(frozen=True, eq=False)
class Expression:
    """A mask as text; made by `fulmen.masks.expression`."""

    text: str
    captures: dict[str, Any]  # what it reads, by name


def _any_above(words: Any) -> bool:
    """Whether a list has words with bit 63 set that are no negative numbers."""
    return any(_any_above(x) if isinstance(x, (list, tuple)) else x >= 2**63 for x in words)


_VALUES = (Prefix, Documents, Chunks, Tree, Blocks)


def prefix(n: int) -> Prefix:
    """Keys below `n` are visible to all rows: a prompt that sees itself whole.

    Args:
        n: number of keys, at least 0. Needs `causal=True`, since without it nothing is hidden.

    >>> prefix(2)
    Prefix(n=2)
    """
    return Prefix(whole("n of masks.prefix", n))


def documents(q_ids: Any, kv_ids: Any = None) -> Documents:
    """Several documents in one sequence: a query sees the keys whose id equals its own.

    Args:
        q_ids: integers of shape (q_row,) or (batch, q_row); for packed sequences (total_q,).
        kv_ids: the same for keys; None: `q_ids`, for self-attention.

    >>> documents([0, 0, 1]).q_ids
    [0, 0, 1]
    """
    return Documents(q_ids, kv_ids)


def chunks(size: int) -> Chunks:
    """Positions in blocks of `size`: query i at position p sees key j where p // size == j // size.

    The position is i + shift, with the shift of `alignment` (kv_len - q_len for bottom_right).

    Args:
        size: positions in a chunk, at least 1.

    >>> chunks(128)
    Chunks(size=128)
    """
    return Chunks(whole("size of masks.chunks", size))


def tree(words: Any) -> Tree:
    """Drafts that branch: which of the last q_len keys each of the q_len queries sees.

    Args:
        words: one int64 a query, of shape (q_row,) or (batch, q_row); packed (total_q,). Bit t of
            the word of row i is key kv_len - q_len + t; earlier keys are visible. A request has at
            most 64 queries, which max_q= says where packed ones are more in all. Every other mask
            must hold too.

    Raises:
        fulmen.Error: in the call that it is given to.

    >>> tree([0b001, 0b011, 0b101]).words
    [1, 3, 5]
    """
    return Tree(words)


def blocks(lists: Any, size: int | tuple[int, int] = 128) -> Blocks:
    """Block-sparse attention: for each block of query rows, the blocks of keys that it sees.

    What is not listed is not computed: time goes with the number of listed blocks. Rows and keys
    are counted in their sequence, and every other mask of the call must hold too.

    Args:
        lists: (batch or 1, head or kv_head or 1, q_block, entry), int32 or int64: the ids of blocks
            of keys, in any order, -1 where a list has fewer; leading axes may be left out. One list
            for each of ceil(q_row / rows) blocks; packed, ceil(max_q / rows). A capture of a CUDA
            graph reads them in every replay.
        size: rows and keys of a block, each a multiple of 64, or one number for both.

    Raises:
        fulmen.Error: in the call that it is given to.

    >>> blocks([[0, -1], [0, 1]], 64).size
    (64, 64)
    """
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ArgumentError(f"size has {len(size)} numbers; (rows, keys) has two")
        rows, keys = size
    else:
        rows = keys = size
    name = "size of masks.blocks"
    return Blocks(lists, (_block_size(name, rows), _block_size(name, keys)))


def _block_size(name: str, size: Any) -> int:
    number: int = whole(name, size)
    if number < 64 or number % 64:
        raise ArgumentError(f"{name} is {number}; a multiple of 64 is allowed")
    return number


def expression(text: str, **captures: Any) -> Expression:
    """A mask as text: true where a row sees a key. A str alone is one that reads no array.

    Args:
        text: as in `fulmen.score`, without s.
        **captures: as there.

    Raises:
        fulmen.Error: in the call that it is given to.

    >>> expression("doc[i] == doc[j] and j <= p", doc=[0, 0, 1]).text
    'doc[i] == doc[j] and j <= p'
    """
    return Expression(errors_text("text of a mask", text, "j <= p"), captures)


def split(mask: Any) -> dict[str, Any]:
    """The options and arrays that `mask=` stands for, by name; each kind of mask at most once.

    Those that are texts are a tuple, "expressions", which fulmen.expressions resolves.

    Raises:
        ArgumentError: two of one kind.
        DTypeError: what is neither a boolean array nor a value of this module.
    """
    found: dict[str, Any] = {}
    for part in mask if isinstance(mask, (tuple, list)) else (mask,):
        if isinstance(part, (str, Expression)):
            made = expression(part) if isinstance(part, str) else part
            found["expressions"] = (*found.get("expressions", ()), made)
            continue
        if isinstance(part, _VALUES):
            named = part.options
        elif hasattr(part, "__dlpack__"):
            named = {"mask": part}
        else:
            raise DTypeError(
                f"mask holds {type(part).__name__}; allowed are a boolean array, the values of "
                "fulmen.masks and a str"
            )
        if any(name in found for name in named):
            said = "boolean arrays; AND them first" if "mask" in named else type(part).__name__
            raise ArgumentError(f"mask holds two {said}: each kind may stand there once")
        found.update(named)
    return found


def hidden(options: Any, level: Any, key: Any) -> list[Any]:
    """What the options that are numbers hide, as boolean arrays; all must be False to be seen.

    Args:
        options: with causal, window_left, window_right and the options of the values above.
        level: i + shift of each query row: the key that it is level with; integers.
        key: j of each key, so that level and key broadcast.
    """
    found: list[Any] = []
    if options.causal:
        found.append((key > level) & (key >= options.prefix))
    if options.window_left >= 0:
        found.append(key < level - options.window_left)
    if options.window_right >= 0:
        found.append(key > level + options.window_right)
    if options.chunk > 0:
        found.append(level // options.chunk != key // options.chunk)
    return found
