# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen bench --tune: tiles of the Hopper forward that beat the rules, searched on this card.

Plain problems fall into classes: head dim, mask, short or long sequences. In each, every shape of a
tile is tried over some lengths at once, then one switch after the other on the fastest. What the
kernel cannot have, or the compiler runs out of registers for, falls out when it is planned. What is
faster than the rules' tile beyond noise is printed, and written as JSON: a finding for whoever
changes the rules.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import fulmen
from fulmen.lab.benchmark.cells import GRIDS, Asked, Cell
from fulmen.lab.benchmark.records import Run
from fulmen.lab.benchmark.sides import random_tensors
from fulmen.lab.benchmark.timing import GpuTimer

from .output import BadInputError, Output

Tile = dict[str, int]  # of the members that fulmen_plan_create_tuned names
Plan = Callable[[Cell, str], Any]  # one of a cell with a tile; raises fulmen.Error

RULES: Tile = {}  # every member as the rules choose it
SHORT = 1024  # rows; as the plan divides sequences
SHAPES = {
    "warpgroups": (2, 3), "kv_rows": (64, 80, 96, 112, 128, 160), "stages": (2, 3, 4),
    "q_slots": (2, 3, 6), "q_register_dims": (0,),
}  # fmt: skip
SWITCHES = {
    "q_register_dims": (32, 64, 96, 112), "overlap": (0, 1), "ping_pong": (0, 1),
    "stage_output": (0, 1), "cache_hints": (0, 1), "heads_per_group": (1, 2, 4, 8, 16),
}  # fmt: skip
FINALISTS = 4  # of a sweep, timed again in every round
MARGIN = 1.01  # what a tile must gain over the rules


class Kind(NamedTuple):
    """A class of problems, and the lengths that stand for it."""

    dim: int
    causal: bool
    is_short: bool
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """What progress calls it."""
        mask = "causal" if self.causal else "full"
        return f"d {self.dim} {mask}, {'up to' if self.is_short else 'beyond'} {SHORT} rows"


class Found(NamedTuple):
    """The fastest tile of a class, and how many times as fast as the rules' it is."""

    kind: Kind
    tile: Tile
    gain: float


def kinds(rows: Sequence[int] | None, dims: Sequence[int] | None) -> list[Kind]:
    """The classes of the forward grid, as far as these lengths and head dims are in it."""
    groups: dict[tuple[int, bool, bool], list[Cell]] = {}
    for cell in GRIDS["forward"].cells(Asked(rows or (512, 1024, 4096, 16384), dims)):
        groups.setdefault((cell.dim, cell.causal, cell.rows <= SHORT), []).append(cell)
    return [Kind(*key, tuple(cells)) for key, cells in groups.items()]


def text_of(tile: Tile) -> str:
    """As plans read it."""
    return " ".join(f"{name}={value}" for name, value in tile.items())


def shapes() -> Iterator[Tile]:
    """Every shape; most do not fit shared memory."""
    for values in product(*SHAPES.values()):
        yield dict(zip(SHAPES, values))


class Search:
    """The search in one class. `timed` gives the seconds of calls by name, in so many rounds."""

    def __init__(
        self, kind: Kind, plan: Plan, timed: Callable[[dict[str, Any], int], dict[str, float]]
    ) -> None:
        """plan(cell, tile) is what is timed: a call without arguments."""
        self.kind = kind
        self.plan = plan
        self.timed = timed

    def planned(self, tiles: list[Tile]) -> dict[str, list[Any]]:
        """Calls of those tiles that can be planned, one for each length; compiled side by side."""

        def calls(tile: Tile) -> list[Any]:
            try:
                return [self.plan(cell, text_of(tile)) for cell in self.kind.cells]
            except fulmen.Error:  # refused by the plan, or given up by the compiler
                return []

        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            made = compilers.map(calls, tiles)
            return {text_of(tile): each for tile, each in zip(tiles, made) if each}

    def seconds(self, calls: dict[str, list[Any]], rounds: int) -> dict[str, float]:
        """The geometric mean over the lengths."""
        logs = dict.fromkeys(calls, 0.0)
        for i in range(len(self.kind.cells)):
            found = self.timed({name: each[i] for name, each in calls.items()}, rounds)
            for name, one in found.items():
                logs[name] += math.log(one)
        return {name: math.exp(total / len(self.kind.cells)) for name, total in logs.items()}

    def best(self, leader: Tile, tiles: list[Tile], rounds: int) -> tuple[Tile, float]:
        """The fastest of all, and how many times as fast as the rules' it is."""
        every = [RULES, leader, *tiles]
        by_name = {text_of(tile): tile for tile in every}
        calls = self.planned(list(by_name.values()))
        if text_of(RULES) not in calls:
            raise BadInputError(f"{self.kind.name}: the Hopper forward has no tile for it")
        quick = self.seconds(calls, 1)
        names = sorted(quick, key=quick.__getitem__)[:FINALISTS]
        kept = dict.fromkeys((*names, text_of(RULES), text_of(leader)))
        sure = self.seconds({name: calls[name] for name in kept}, rounds)
        fastest = min(sure, key=sure.__getitem__)
        return by_name[fastest], sure[text_of(RULES)] / sure[fastest]

    def run(self, rounds: int, until: float) -> Found:
        """Shapes first, then the switches one after the other, as long as there is time."""
        tile, gain = self.best(RULES, list(shapes()), rounds)
        for name, values in SWITCHES.items():
            if time.perf_counter() > until:
                break
            tile, gain = self.best(tile, [{**tile, name: value} for value in values], rounds)
        return Found(self.kind, tile, gain)


def findings(found: list[Found], run: Run) -> dict[str, Any]:
    """The tiles that are faster than the rules', with what they were measured on."""
    return {
        "card": run.card,
        "date": run.date,
        "commit": run.commit,
        "tiles": [
            {
                "dim": kind.dim,
                "causal": kind.causal,
                "rows": [cell.rows for cell in kind.cells],
                "gain": round(gain, 3),
                "tile": text_of(tile),
            }
            for kind, tile, gain in found
            if gain >= MARGIN
        ],
    }


def tune(
    path: Path,
    rows: Sequence[int] | None,
    dims: Sequence[int] | None,
    rounds: int,
    seconds: float,
    output: Output,
) -> int:
    """Searches every class, prints and writes what it found. They share the time equally."""
    import torch

    timer = GpuTimer(rounds)
    tensors: dict[Cell, Any] = {}

    def plan(cell: Cell, tile: str) -> Any:
        x = tensors[cell]
        made = fulmen.plan(
            x.q, x.k, x.v, need=(), causal=cell.causal, implementation="sm90", tile=tile
        )
        o = torch.empty_like(x.q)
        return lambda: made.forward(x.q, x.k, x.v, out=o)

    def timed(calls: dict[str, Any], rounds: int) -> dict[str, float]:
        timer.rounds = rounds
        return {name: times.median for name, times in timer.burst(calls).items()}

    every, found = kinds(rows, dims), []
    start = time.perf_counter()
    with output.progress("tuning", len(every)) as advance:
        for i, kind in enumerate(every):
            tensors = {cell: random_tensors(cell, torch, "cuda") for cell in kind.cells}
            until = start + seconds * (i + 1) / len(every)
            found.append(Search(kind, plan, timed).run(rounds, until))
            advance(1)
    output.table(
        ["class", "times as fast", "tile"],
        [(kind.name, f"{gain:.3f}", text_of(tile) or "the rules'") for kind, tile, gain in found],
    )
    path.write_text(json.dumps(findings(found, Run("cuda")), indent=1) + "\n", encoding="utf-8")
    output.line(f"written: {path}")
    return 0
