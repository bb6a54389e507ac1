# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Few rows in which every two levels of every two factors meet.

Greedy: each row starts from a pair that has not met yet and takes, of some random completions, the
one with the most new pairs. The same seed gives the same rows. Used by catalogue.grid; a test
counts the pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

COMPLETIONS = 40  # random rows tried for each row kept


def pairs_of(levels: Mapping[str, int]) -> set[Pair]:
    """Every pair of (factor, level index) in a row."""
    return set(combinations(sorted(levels.items()), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], seed: int
) -> list[Row]:
    """Rows that cover every pair of levels that some allowed row has.

    Args:
        factors: the levels of each factor.
        allowed: whether a row makes sense.
        seed: of the random completions.

    Returns:
        The rows, each with one level of every factor. A pair that no allowed completion was found
        for after many tries is taken to be impossible.
    """
    rng = random.Random(seed)
    names = sorted(factors)

    def values(levels: Mapping[str, int]) -> Row:
        return {name: factors[name][levels[name]] for name in names}

    missing: set[Pair] = set()
    for a, b in combinations(names, 2):
        pairs = product(range(len(factors[a])), range(len(factors[b])))
        missing |= {((a, x), (b, y)) for x, y in pairs}
    rows = []
    while missing:
        first = min(missing)
        tries = []
        for _ in range(COMPLETIONS):
            row = {name: rng.randrange(len(factors[name])) for name in names}
            row.update(dict(first))
            if allowed(values(row)):
                tries.append(row)
        if not tries:
            missing.remove(first)
            continue
        best = max(tries, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(values(best))
    return rows
