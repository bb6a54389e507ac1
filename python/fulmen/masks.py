# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Masks as values: what a query may see, said without a matrix.

Each is one small frozen object for `mask=` of the attention calls, alone or in a tuple (all must
hold), beside a boolean array if need be. They cost no quadratic memory; `fulmen.dense_mask` prints
the matrix that they mean.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

__all__ = ["Chunks", "Documents", "Prefix", "chunks", "documents", "prefix"]


@dataclass(frozen=True)
class Prefix:
    """The first `n` keys are visible to every row, before the causal diagonal too."""

    n: int


@dataclass(frozen=True, eq=False)
class Documents:
    """A query sees only the keys with the same id; `kv_ids` None: the ids of the queries."""

    q_ids: Any  # (q_row,) or (batch, q_row), int32 or int64; packed (total_q,)
    kv_ids: Any = None  # (kv_row,) or (batch, kv_row) likewise


@dataclass(frozen=True)
class Chunks:
    """A query sees only the keys of its own chunk of `size` positions."""

    size: int


def prefix(n: int) -> Prefix:
    """Keys below `n` are visible to all rows: a prompt that sees itself whole.

    Args:
        n: number of keys, at least 0. Needs `causal=True`, since without it nothing is hidden.

    >>> prefix(2)
    Prefix(n=2)
    """
    return Prefix(operator.index(n))


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
    return Chunks(operator.index(size))
