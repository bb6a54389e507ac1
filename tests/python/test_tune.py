# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen bench --tune`: the search over tiles, its findings, and tiles that plans refuse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.cli.tune import RULES, SHAPES, SWITCHES, Found, Search, findings, kinds
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run

Q = np.ones((1, 8, 512, 64), np.float16)


def seconds(tile: str) -> float:
    """How long a card would take that likes 80 keys, two warpgroups and no ping-pong."""
    members = dict(word.split("=") for word in tile.split())
    slow = 1.0 if not members else 0.9
    slow += abs(int(members.get("kv_rows", 64)) - 80) / 1000
    slow += 0.05 * (members.get("warpgroups", "3") != "2")
    return slow - 0.02 * (members.get("ping_pong") == "0")


def plan(cell: Cell, tile: str) -> float:
    if "stages=4" in tile or "kv_rows=160" in tile:
        raise fulmen.UnsupportedError("it does not fit")
    return cell.rows * seconds(tile)


def timed(calls: dict[str, float], rounds: int) -> dict[str, float]:
    assert rounds in (1, 7)
    return calls


def test_the_search_finds_the_fastest_tile_that_can_be_planned() -> None:
    kind = kinds([512, 1024], [64])[0]
    found = Search(kind, plan, timed).run(7, until=float("inf"))
    assert found.tile["kv_rows"] == 80
    assert found.tile["warpgroups"] == 2
    assert found.tile["ping_pong"] == 0
    assert found.tile["stages"] != 4
    assert found.gain == pytest.approx((1.0 + 0.016 + 0.05) / (0.9 - 0.02))


def test_without_time_only_shapes_are_tried() -> None:
    found = Search(kinds([4096], [128])[0], plan, timed).run(7, until=0.0)
    assert set(found.tile) == set(SHAPES)


def test_the_rules_stay_where_nothing_is_faster() -> None:
    def flat(calls: dict[str, float], rounds: int) -> dict[str, float]:
        return {name: 1.0 + (name != "") for name in calls}

    found = Search(kinds([4096], [128])[1], plan, flat).run(7, until=float("inf"))
    assert found.tile == RULES
    assert found.gain == 1


def test_classes_divide_the_grid() -> None:
    every = kinds(None, None)
    assert len(every) == 12
    assert {c.rows for kind in every if kind.is_short for c in kind.cells} == {512, 1024}
    assert len({kind.name for kind in every}) == 12


def test_findings_are_the_tiles_that_beat_the_rules() -> None:
    kind = kinds([4096], [128])[1]
    tile = {name: values[0] for name, values in {**SHAPES, **SWITCHES}.items()}
    found = findings([Found(kind, tile, 1.02), Found(kind, RULES, 1.0)], Run("cpu"))
    (row,) = json.loads(json.dumps(found))["tiles"]
    assert row["dim"] == 128
    assert row["causal"]
    assert row["rows"] == [4096]
    assert row["gain"] == 1.02
    assert "kv_rows=64" in row["tile"].split()


@pytest.mark.parametrize(
    ("tile", "options", "text"),
    [
        ("kv_rows", {}, "tile has 'kv_rows'; allowed are warpgroups=1..3"),
        ("kv_rows=80 kv_row=80", {}, "tile has 'kv_row=80'"),
        ("stages=7", {}, "tile has 'stages=7'"),
        ("stages=2x", {}, "tile has 'stages=2x'"),
        ("stages=2", {"backend": "cpu"}, "the plan is for the CPU"),
        ("kv_rows=72", {"device_name": "h100"}, "is none that its kernel can have"),
        ("stages=6 kv_rows=256", {"device_name": "h100"}, "bytes of shared memory"),
        ("stages=2", {"device_name": "a100"}, "has no tiles to choose from"),
    ],
)
def test_a_tile_that_cannot_be_is_refused(tile: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(fulmen.Error) as refused:
        fulmen.plan(Q, Q, Q, need=(), tile=tile, **options)
    assert text in str(refused.value)
