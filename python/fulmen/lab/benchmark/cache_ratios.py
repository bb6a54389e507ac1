# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the records of one run of a grid of caches say of each other: fulmen against fulmen.

A ratio is of times, or where the cells have other bytes, of times a byte: 1.05 is 5 % slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .records import Record

NORMAL_PAGE = 16


class Ratio(NamedTuple):
    """A cell against what it is measured by."""

    what: str
    shape: str  # of the cell
    times: float


def ratios(records: Sequence[Record]) -> Iterator[Ratio]:
    """In the order of the records; of those of one implementation, the first."""
    ours = [r for r in records if r["who"] == "fulmen" and r["case"] != "sustained"]
    for r in ours:
        one = _like(ours, r, seqlen_q=1, seqlen_kv=r["seqlen_kv"])
        if r["seqlen_q"] > 1 and r["causal"] and one is not None and not r["packed"]:
            yield Ratio(
                f"{r['seqlen_q']} query rows, of one", r["shape"], r["p50_ms"] / one["p50_ms"]
            )
        even = _like(ours, r, is_even=True, seqlen_q=r["seqlen_q"])
        if not r["is_even"] and even is not None:
            yield Ratio("drawn lengths, of equal ones a byte", r["shape"], even["gbps"] / r["gbps"])
        normal = _like(ours, r, page=NORMAL_PAGE, kv_total=r["kv_total"], seqlen_q=r["seqlen_q"])
        if r["page"] not in (0, NORMAL_PAGE) and normal is not None:
            said = f"page {r['page']}, of page {NORMAL_PAGE}"
            yield Ratio(said, r["shape"], r["p50_ms"] / normal["p50_ms"])
        wide = _like(ours, r, option="", kv_total=r["kv_total"], seqlen_q=r["seqlen_q"])
        if r["option"] and wide is not None:
            yield Ratio(f"caches of {wide['dtype']}, of {r['option']}", r["shape"],
                        wide["p50_ms"] / r["p50_ms"])  # fmt: skip
    for r in records:
        plain = next((x for x in ours if x["shape"] == r["shape"]), None)
        if r["who"].startswith("fulmen ") and r["case"] != "sustained" and plain is not None:
            yield Ratio(f"{r['who']}, of fulmen", r["shape"], r["p50_ms"] / plain["p50_ms"])


def _like(records: Sequence[Record], r: Record, **others: object) -> Record | None:
    """The first record that has these members, and what else makes a cell as r has it."""
    members = {
        name: r[name] for name in ("batch", "heads_kv", "d_qk", "page", "option", "packed", "dtype")
    }
    members.update(others)
    found = (x for x in records if x is not r and all(x[m] == y for m, y in members.items()))
    return next(found, None)
