# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid `expressions` of `fulmen bench` without a GPU: its cells, and each side's answer."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from fulmen.cli import expression_bench
from fulmen.cli.main import main
from fulmen.cli.output import Output
from fulmen.lab.benchmark import expression_cells, expression_sides
from fulmen.lab.benchmark.cells import Asked
from fulmen.lab.benchmark.expression_cells import (
    EXPRESSION_GRIDS,
    VARIANTS,
    ExpressionCell,
    as_option,
)
from fulmen.lab.benchmark.expression_sides import (
    ExpressionTruth,
    FlexExpression,
    FulmenExpression,
    random_captures,
)
from fulmen.lab.benchmark.loading import MissingError


def test_the_cells_are_what_the_documentation_says() -> None:
    cells = list(EXPRESSION_GRIDS["expressions"].cells())
    assert [(c.dim, c.option, c.op) for c in cells] == [
        (dim, variant, op) for dim in (128, 64) for variant in VARIANTS
        for op in ("forward", "backward")
    ]  # fmt: skip
    assert {(c.rows, c.heads * c.dim, c.batch, c.dtype) for c in cells} == {
        (16384, 2048, 1, "bfloat16")
    }
    shares = {c.option: c.visible_share for c in cells}
    assert shares["documents"] == 1 / 8
    assert shares["prefix"] == pytest.approx(0.53128, abs=1e-5)
    assert shares["blocks-0.25"] == 0.25
    assert cells[0].lists is not None
    few = list(EXPRESSION_GRIDS["expressions"].cells(Asked([100], [64])))
    assert {c.option for c in few} == {x for x in VARIANTS if not x.startswith("blocks")}


def shown(monkeypatch: pytest.MonkeyPatch, op: str, variant: str) -> tuple[ExpressionCell, Any]:
    """A small cell of which every part of the mask is seen, and its arrays."""
    for module in (expression_cells, expression_sides):
        monkeypatch.setattr(module, "DOCUMENT", 100)
    monkeypatch.setattr(expression_cells, "PREFIX", 60)
    cells = EXPRESSION_GRIDS["expressions"].cells(Asked([256], [16], "float32"))
    cell = next(replace(c, heads=2, kv_heads=2) for c in cells if (c.op, c.option) == (op, variant))
    return cell, random_captures(cell, torch, "cpu")


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_and_an_option_are_right(
    variant: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, t = shown(monkeypatch, op, variant)
    truth = ExpressionTruth(cell, t, torch)
    sides = [FulmenExpression("auto")]
    if variant in ("alibi", "softcap", "documents", "prefix", "segments"):
        sides.append(FulmenExpression("auto", keywords=as_option))
    else:
        with pytest.raises(MissingError, match=f"no option means {variant}"):
            FulmenExpression("auto", keywords=as_option).answer(cell, t)
    for side in sides:
        answer = side.answer(cell, t)
        assert truth.error(answer.results(answer.call())) < 3e-6
    visible = cell.visible_share * cell.rows**2
    assert visible == round(visible)
    wrong = tuple(x + 1e-3 for x in answer.results(answer.call()))
    assert truth.error(wrong) > 1e-4


@pytest.mark.parametrize(
    "variant", ["alibi", "softcap", "documents", "prefix", "relative", "segments"]
)
def test_flex_answers_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    cell, t = shown(monkeypatch, "forward", variant)
    answer = FlexExpression().answer(cell, t)
    assert ExpressionTruth(cell, t, torch).error(answer.results(answer.call())) < 3e-6


def test_lists_are_flex_block_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, t = shown(monkeypatch, "forward", "blocks-0.5")
    mask = FlexExpression()._block_mask(replace(cell, rows=256), t)
    listed = torch.zeros(1, 2, 2, 2).scatter_(3, t.lists.long(), 1.0)
    assert torch.equal(mask.to_dense(), listed.to(torch.int32))


def test_a_cell_is_run_among_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, _ = shown(monkeypatch, "backward", "alibi")
    arguments = argparse.Namespace(
        sustained=False, rounds=1, peers=[], fa3_operators=None, implementation=None
    )
    bench = expression_bench.ExpressionBench("cpu", arguments, Output(as_json=True))
    found = bench.run(cell)
    assert not bench.missing
    assert [(r["who"], r["option"], r["visible_share"]) for r in found] == [
        ("fulmen", "alibi", 1.0), ("fulmen option", "alibi", 1.0),
    ]  # fmt: skip
    assert all(
        r["max_error"] < 3e-6 and r["of_plain"] == r["p50_ms"] / r["plain_ms"] for r in found
    )
    assert {key for _, key in bench.columns(found)} <= set(found[0])


def test_tables_and_words(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    record = {"op": "forward", "d_qk": 128, "option": "alibi", "plain_ms": 2.0, "seqlen_q": 16384,
              "who": "fulmen", "implementation": "sm90", "p50_ms": 2.2, "p99_ms": 2.4,
              "tflops": 700.0, "of_plain": 1.1, "max_error": 1e-3}  # fmt: skip
    bench = expression_bench.ExpressionBench.__new__(expression_bench.ExpressionBench)
    ((title, _, rows),) = bench.tables([record])
    assert title == "forward alibi D128 of 16384 rows; a plain call 2 ms"
    assert rows[0][-2:] == ("1.10", "1.0e-03")
    assert main(["bench", "--grid", "expressions", "--precision", "tf32"]) == 2
    assert "--precision is for float32" in capsys.readouterr().err
    assert main(["bench", "--grid", "expressions", "--heads", "2"]) == 2
    assert "--heads is for --grid" in capsys.readouterr().err
