# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid of latent attention: its cells, fulmen's answer on the CPU, the truth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from graphless_timer import GraphlessTimer

from fulmen.cli.latent_bench import LatentBench
from fulmen.cli.main import main
from fulmen.cli.output import Output
from fulmen.lab.benchmark.cells import Asked
from fulmen.lab.benchmark.latent_cells import LATENT_GRIDS, LISTS, LatentCell
from fulmen.lab.benchmark.latent_sides import (
    FulmenLatent,
    LatentTruth,
    known_peer,
    random_latents,
)
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.records import Run

CELL = LatentCell("latent", "forward", "bfloat16", 2, 3, 1, 1, 576, False, keys=64, page=16)


def test_cells_say_what_they_are() -> None:
    cells = list(LATENT_GRIDS["latent"].cells())
    assert len({cell.name for cell in cells}) == len(cells)
    dense = next(x for x in cells if not x.option)
    assert dense.shape == "128x4096 heads 128 page 64"
    assert dense.array_bytes == 128 * (128 * 1088 * 2 + 4096 * 1152)
    assert dense.flops == 2 * 128 * 4096 * 128 * 1088
    records = list(LATENT_GRIDS["latent"].cells(Asked(rows=(2048,))))
    assert [x.row_bytes for x in records[:2]] == [656, 584]


@pytest.mark.parametrize("option", ["", LISTS, "656", "584"])
def test_answers_are_those_of_the_truth(option: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cell = replace(CELL, option=option)
    latents = random_latents(cell, torch, "cpu")
    truth = LatentTruth(cell, latents, torch)
    answer = FulmenLatent().answer(cell, latents)
    got = answer.results(answer.call())
    assert truth.error(got) < 0.05
    assert truth.error((got[0] + 1,)) > 0.9
    got[0][:] = math.nan
    assert math.isnan(truth.error(got))


def test_other_peers_are_named() -> None:
    with pytest.raises(MissingError, match="flash_mla"):
        known_peer("cudnn")


class Reads:
    """Stands for the plain reads of a GPU."""

    def calls(self, count: int) -> dict[str, Any]:
        return {"quick": lambda: sum(range(300))}


def test_records_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    bench = LatentBench.__new__(LatentBench)
    bench.backend = bench.device = "cpu"
    bench.output = Output(False)
    bench.say = lambda now: None
    bench.sustained = False
    bench.missing = {}
    bench.peak = Reads()
    bench.torch = torch
    bench.timer = GraphlessTimer(3)
    bench.common = Run("cpu")
    bench.sides = [FulmenLatent()]
    (record,) = bench.run(CELL)
    assert (record["who"], record["shape"]) == ("fulmen", "2x64 heads 3 page 16")
    assert record["seqlen_kv"] == 64
    assert record["max_error"] < 0.05
    assert math.isclose(record["of_read"], record["read_ms"] / record["p50_ms"])
    ((title, columns, rows),) = bench.tables([record])
    bench.output.line(title)
    bench.output.table(columns, rows)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--grid", "latent", "--dims", "64"]) == 2
    assert "--grid latent has one head dim" in capsys.readouterr().err
