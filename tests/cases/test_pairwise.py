# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The pairwise generator and the tables of cases: what they promise to cover is covered."""

import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from fulmen.lab.cases import all_cases, find
from fulmen.lab.cases.arrays import DTYPES
from fulmen.lab.cases.catalogue import grid
from fulmen.lab.cases.catalogue.lengths import EDGES
from fulmen.lab.cases.catalogue.owed import OWED, REPORTED
from fulmen.lab.cases.catalogue.shapes import DIMS, PAIRS, RATIOS
from fulmen.lab.cases.pairwise import pairwise

TORCH = Path(__file__).parents[1] / "torch"


def test_every_pair_meets():
    factors = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3)}
    rows = pairwise(factors, lambda row: True, seed=0)
    for x, y in combinations(factors, 2):
        met = {(row[x], row[y]) for row in rows}
        assert len(met) == len(factors[x]) * len(factors[y])
    assert len(rows) <= 16  # 12 are needed


def test_impossible_pairs_are_left_out_and_the_rest_meets():
    rows = pairwise({"a": (0, 1), "b": (0, 1)}, lambda row: row["a"] + row["b"] < 2, seed=0)
    assert {(row["a"], row["b"]) for row in rows} == {(0, 0), (0, 1), (1, 0)}


def test_the_same_seed_gives_the_same_rows():
    factors = {"a": tuple(range(4)), "b": tuple(range(4)), "c": tuple(range(4))}
    first, again = (pairwise(factors, lambda row: True, seed=3) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("seed", grid.SEEDS)
def test_the_grid_has_every_allowed_pair(seed):
    """Impossible are: look-ahead windows and causal, prefix without causal, and so on."""
    rows = pairwise(grid.FACTORS, grid.allowed, seed)
    assert all(grid.allowed(row) for row in rows)
    impossible = 0
    for x, y in combinations(sorted(grid.FACTORS), 2):
        met = {(repr(row[x]), repr(row[y])) for row in rows}
        impossible += len(grid.FACTORS[x]) * len(grid.FACTORS[y]) - len(met)
    # order x window: 2; order x mask: 4; mask x window: 2; bias x lengths: 2; bias x dtype: 1
    assert impossible == 11


def test_how_many():
    counts = Counter(tag for case in all_cases() for tag in case.tags)
    assert len(all_cases()) >= 2000
    assert counts["bug"] >= 100
    assert counts["grid"] >= 250


def test_every_report_has_a_case_or_waits_for_one():
    covered = {case.name.split("_")[0] for case in find("bug")}
    for file in TORCH.glob("test_*.py"):
        covered |= set(re.findall(r"_(u\d{2,})(?=_)", file.read_text(encoding="utf-8")))
    owed = {row.number for row in OWED}
    assert covered | owed == set(REPORTED)
    assert len(owed) == len(OWED)


def test_lengths_pass_through_every_residue_in_both_axes():
    cases = find("lengths")
    for modulus in (16, 32, 64, 128):
        assert {c.q_rows % modulus for c in cases} == set(range(modulus))
        assert {c.kv_rows % modulus for c in cases} == set(range(modulus))
    met = {(c.q_rows, c.kv_rows) for c in cases}
    assert {(q, k) for q in EDGES for k in EDGES} <= met


def test_shapes_are_all_there():
    cases = all_cases()
    assert {(d, d, t) for d in DIMS for t in DTYPES} <= {(c.dim, c.dim_v, c.dtype) for c in cases}
    assert set(PAIRS) <= {(c.dim, c.dim_v) for c in cases}
    assert set(RATIOS) <= {c.heads // c.kv_heads for c in cases if c.kv_heads}
    assert {(192, 128), (576, 512), (64, 256)} <= set(PAIRS)


def test_find():
    assert [c.name for c in find("dim64_float32")] == ["dim64_float32"]
    assert {c.tags for c in find("grid")} == {("grid",)}
    assert len(find("u35_*")) == 6
    assert find() == all_cases()
    with pytest.raises(LookupError, match="no_such"):
        find("no_such")


def test_a_case_shows_what_is_special_about_it():
    (case,) = find("u35_neg_shift_s704")
    shown = case.changed()
    assert shown["q_rows"] == 704
    assert "softcap" not in shown
