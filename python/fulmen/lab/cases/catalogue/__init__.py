# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The named cases: data shared by pytest, `fulmen verify` and bench.

Read the tables in this order: bugs_rows, bugs_numbers, bugs_masks (public bug reports; owed: those
that wait), lengths, shapes, numbers, memory, options, pair_tiles, packed, caches, decodes,
cascades, latent, sparse, appended, indexer, quantised, rounded, expressions, segments, accumulated,
grid.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

from ..case import Case
from . import (
    accumulated,
    appended,
    block_lists,
    bugs_masks,
    bugs_numbers,
    bugs_rows,
    caches,
    cascades,
    decodes,
    expressions,
    grid,
    indexer,
    latent,
    lengths,
    memory,
    numbers,
    options,
    packed,
    pair_tiles,
    quantised,
    rounded,
    segments,
    shapes,
    sparse,
)

TABLES = (
    bugs_rows, bugs_numbers, bugs_masks, lengths, shapes, numbers, memory, options, pair_tiles,
    packed, caches, decodes, cascades, latent, sparse, appended, indexer, quantised, rounded,
    expressions, block_lists, segments, accumulated, grid,
)  # fmt: skip


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the tables.

    Raises:
        ValueError: two cases have the same name.
    """
    cases = tuple(case for table in TABLES for case in table.CASES)
    seen: set[str] = set()
    for case in cases:
        if case.name in seen:
            raise ValueError(f"two cases are called {case.name}")
        seen.add(case.name)
    return cases


def find(*patterns: str) -> tuple[Case, ...]:
    """The cases that a pattern names: a name, a shell pattern ("u35_*"), or a tag ("bug").

    Args:
        patterns: any of them may match; none at all means every case.

    Returns:
        The cases in the order of the tables.

    Raises:
        LookupError: a pattern that matches nothing.
    """
    if not patterns:
        return all_cases()
    found = set()
    for pattern in patterns:
        names = {c.name for c in all_cases() if fnmatchcase(c.name, pattern) or pattern in c.tags}
        if not names:
            raise LookupError(f"no case and no tag is called {pattern}")
        found |= names
    return tuple(case for case in all_cases() if case.name in found)
