# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen verify --gradient-errors`: a table of relative errors over drawn shapes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fulmen.cli import gradient_errors
from fulmen.cli.main import main
from fulmen.lab.cases import run

ASKED = ["verify", "--backend", "cpu", "--implementation", "tiled", "--gradient-errors"]


def test_a_row_for_each_type_and_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {(row[1], row[2]) for row in rows} == {
        (dtype, name) for dtype in gradient_errors.DTYPES for name in gradient_errors.NAMES
    }
    for row in rows:
        eps = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[row[1]]
        assert row[3] == "2"
        assert all(0 < float(figure) < eps for figure in row[4:])


def test_shapes_are_drawn_once_and_for_all() -> None:
    one, two = (list(gradient_errors.drawn(40)) for _ in range(2))
    assert one == two
    assert len({(case.q_rows, case.kv_rows, case.dim) for case in one}) > 30
    assert all(case.q_rows <= case.kv_rows <= gradient_errors.MOST_ROWS for case in one)


def test_relative_errors() -> None:
    truth = np.array([3.0, 4.0])
    assert gradient_errors.relative(truth + np.array([0, 0.5]), truth) == 0.1
    assert gradient_errors.relative(0 * truth, 0 * truth) == 0
    assert gradient_errors.relative(truth, 0 * truth) == math.inf


def test_a_wrong_gradient_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run.results

    def wrong(*words: Any) -> Any:
        got, oracle = found(*words)
        return {**got, "dk": 1.01 * got["dk"]}, oracle

    monkeypatch.setattr(run, "results", wrong)
    assert main([*ASKED, "1"]) == 1
    text = capsys.readouterr().out
    assert "drawn0000_float32 on tiled: dk: error" in text
    assert main([*ASKED, "1", "--json"]) == 1
    records = json.loads(capsys.readouterr().out)
    assert [r["relative_error"] > 9e-3 for r in records if r["dtype"] == "float32"] == [
        r["result"] == "dk" for r in records if r["dtype"] == "float32"
    ]


def test_it_draws_its_own_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "1", "decode_k31"]) == 2
    assert "draws its own cases" in capsys.readouterr().err
