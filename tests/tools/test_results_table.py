# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of bench/results: a row for each length and number of heads, a row for each rung."""

import json
from pathlib import Path

import pytest

import results_table

BASE = {
    "op": "forward", "dtype": "bfloat16", "case": "burst", "card": "a card", "causal": False,
    "d_qk": 64, "implementation": "x", "seqlen_q": 1024, "heads_q": 8, "p50_ms": 1.0,
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function of records, given as changes to BASE, that writes them and asks for a table."""
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)

    def made(kind: str, *changes: dict) -> list[str]:
        lines = [json.dumps({**BASE, **change}) + "\n" for change in changes]
        (tmp_path / "x.jsonl").write_text("".join(lines))
        return getattr(results_table, kind)("x.jsonl").splitlines()[2:]

    return made


def test_lengths_alone_where_heads_follow_from_the_head_dim(table) -> None:
    rows = table(
        "table",
        {"who": "fulmen", "tflops": 300.0},
        {"who": "naive", "tflops": 30.0},
        {"who": "fulmen", "tflops": 200.0, "d_qk": 128, "heads_q": 4},
    )
    assert rows == [
        "| S | D64 full | D128 full |", "|---|---|---|", "| 1024 | **300** / 30 | **200** / - |",
    ]  # fmt: skip


def test_numbers_of_heads_where_there_are_several(table) -> None:
    rows = table(
        "table",
        {"who": "fulmen", "tflops": 300.0, "heads_q": 16},
        {"who": "fulmen", "tflops": 100.0},
        {"who": "naive", "tflops": 200.0},
    )
    assert rows[0] == "| heads x S | D64 full |"
    assert rows[2:] == ["| 8 x 1024 | 100 / **200** |", "| 16 x 1024 | **300** / - |"]


def test_rungs_beside_each_other(table) -> None:
    rows = table(
        "rungs",
        {"who": "fulmen", "implementation": "sm80", "p50_ms": 0.25},
        {"who": "naive", "implementation": "naive.py", "p50_ms": 1.0},
        {"who": "naive", "implementation": "naive.py", "p50_ms": 4.0, "op": "backward"},
    )
    assert rows == [
        "| rung | forward 1024, 64, 8 | backward 1024, 64, 8 |",
        "|---|---|---|",
        "| fulmen sm80 | **0.25** | - |",
        "| naive | 1 | **4** |",
    ]
