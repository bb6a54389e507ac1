# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen bench` on the CPU: records, the truth behind its errors, the page, the order of calls."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulmen.cli import ablation, bench
from fulmen.cli.main import main
from fulmen.lab.benchmark import (
    cells,
    fma_peak,
    loading,
    machine,
    page,
    plots,
    reference,
    timing,
)
from fulmen.lab.benchmark.cells import GRIDS, Asked, Cell
from fulmen.lab.benchmark.reference import Truth
from fulmen.lab.benchmark.sides import NaiveNumpy, Side, Tensors

TINY = ["bench", "--grid", "cpu", "--rows", "96", "--dims", "16", "--rounds", "2"]
FIELDS = {
    *("grid", "op", "who", "implementation", "dtype", "batch", "heads_q", "heads_kv"),
    *("seqlen_q", "seqlen_kv", "d_qk", "d_v", "causal", "option", "case", "p50_ms", "p99_ms"),
    *("tflops", "gbps", "peak_mib", "max_error", "card", "clock_mhz", "versions", "commit", "date"),
}
CELL = Cell("test", "forward", "float32", 2, 3, 3, 40, 8, True)


def test_a_tiny_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "-o", str(tmp_path), "--peers", "naive", "flashinfer"]) == 0
    text = capsys.readouterr().out
    assert "flashinfer is left out" in text
    assert "forward float32 1x4x96x16 causal" in text
    assert "GFLOP/s" in text
    tables = text[: text.index("flashinfer is left out")]
    assert max(map(len, tables.splitlines())) <= 80
    (path,) = tmp_path.glob("*-cpu-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    ours = [r for r in records if r["who"] == "fulmen"]
    assert {(r["op"], r["causal"]) for r in ours} == {
        (op, causal) for op in ("forward", "backward") for causal in (False, True)
    }
    assert any(r["who"] == "naive" for r in records)
    product = {"product_tflops"} if importlib.util.find_spec("torch") else set()
    for r in records:
        assert set(r) == FIELDS | product | {"peak_tflops"}
        assert min(r["tflops"], r["peak_tflops"]) > 0  # not compared: the machine may be in use
        assert 0 < r["p50_ms"] <= r["p99_ms"]
        assert r["max_error"] < 1e-4
        assert r["card"] == machine.processor()
        flops = 4 * r["heads_q"] * 96 * 96 * 16 * (0.5 if r["causal"] else 1)
        flops *= 2.5 if r["op"] == "backward" else 1
        assert math.isclose(r["tflops"], flops / r["p50_ms"] / 1e9, rel_tol=1e-6)
    html = path.with_suffix(".html").read_text()
    assert html.count("<tr") == len(records) + 1
    assert "GFLOP/s" in html
    drawn = sorted(path.stem for path in tmp_path.glob("*.svg"))
    assert drawn == sorted(path.stem for path in tmp_path.glob("*.png"))
    if drawn:
        assert len(drawn) >= 4  # forward and backward, full and causal; memory where it is told
        assert html.count("<svg") == len(drawn)
    else:
        assert plots.NO_PLOTS in html
        assert plots.NO_PLOTS in text
    assert not re.search(r"(src|href)=.?https?:", html)  # one file that loads nothing


def test_json_and_several_implementations(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--implementation", "scalar", "tiled", "--peers", "--json")
    assert main([*TINY, *words]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {r["implementation"] for r in records} == {"scalar", "tiled"}
    assert {r["who"] for r in records} == {"fulmen"}


def test_a_grid_for_a_gpu_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch") if _has_torch() else None
    if torch is not None and torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--grid", "forward"]) == 2
    assert "GPU" in capsys.readouterr().err


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def tensors(cell: Cell) -> Tensors:
    rng = np.random.default_rng(1)
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    return Tensors(*(rng.standard_normal((cell.batch, h, cell.rows, cell.dim)) for h in heads))


@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_truth_is_attention_and_sees_an_error(op: str, kv_heads: int) -> None:
    import fulmen

    cell = Cell("test", op, "float64", 2, 3, kv_heads, 40, 8, True)
    t = tensors(cell)
    truth = Truth(cell, t, np)
    forward = fulmen.attention_forward(t.q, t.k, t.v, causal=True)
    got: Any = (forward.o,)
    if op == "backward":
        got = fulmen.attention_backward(t.do, t.q, t.k, t.v, forward.o, forward.stats, causal=True)[
            :3
        ]
    assert truth.error(got) < 1e-12
    wrong = [x.copy() for x in got]
    wrong[-1][truth.batch, truth.heads[-1], truth.rows[0], 0] += 1e-3
    assert math.isclose(truth.error(tuple(wrong)), 1e-3, rel_tol=1e-6)
    wrong[-1][truth.batch, truth.heads[-1], truth.rows[0], 0] = np.nan
    assert math.isnan(truth.error(tuple(wrong)))


@pytest.mark.parametrize("option", ["window", "documents"])
def test_the_truth_knows_windows_and_documents(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fulmen

    monkeypatch.setattr(cells, "DOCUMENT", 8)
    for module in (cells, reference):
        monkeypatch.setattr(module, "WINDOW", 5)
    cell = Cell("test", "forward", "float64", 1, 2, 2, 40, 8, True, option=option)
    t = tensors(cell)
    seen = (
        {"window": (5, 0)}
        if option == "window"
        else {"mask": fulmen.masks.documents([i // 8 for i in range(40)])}
    )
    o = fulmen.attention(t.q, t.k, t.v, causal=True, **seen)
    assert Truth(cell, t, np).error((o,)) < 1e-12
    pairs = sum(min(i, 5) + 1 for i in range(40)) if option == "window" else 5 * 8 * 8 / 2
    assert cell.flops == 4 * 2 * pairs * 8


def test_the_naive_way_is_right_too() -> None:
    t = tensors(CELL)
    answer = NaiveNumpy().answer(CELL, t)
    assert Truth(CELL, t, np).error(answer.results(answer.call())) < 1e-12


def test_sides_take_turns_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: order.append("|"))
    timer = timing.CpuTimer(20)
    found = timer.burst({name: (lambda name=name: order.append(name)) for name in "abc"})
    visits = "".join(order).split("|")[1:]  # each after an idle gap, with a call that warms up
    assert all(len(visit) > 1 and set(visit) == {visit[0]} for visit in visits)
    rounds = ["".join(visit[0] for visit in visits[i : i + 3]) for i in range(0, len(visits), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 2
    assert {len(times.medians) for times in found.values()} == {20}


def test_times() -> None:
    times = timing.Times([3.0, 1.0, 2.0], [float(i) for i in range(100)])
    assert times.median == 2
    assert times.p99 == 99


def test_a_side_that_fails_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Side):
        name = "broken"

        def answer(self, cell: Cell, tensors: Tensors) -> Any:
            raise RuntimeError("planted\nsecond line")

    monkey = pytest.MonkeyPatch()
    monkey.setitem(bench.PEERS, "fa3", Broken)
    monkey.setattr(bench.Bench, "_add", lambda self, name, path: self.sides.append(Broken()))
    try:
        assert main([*TINY, "--peers", "fa3"]) == 0
    finally:
        monkey.undo()
    assert "broken is left out of forward float32 1x4x96x16 full: RuntimeError: planted" in (
        capsys.readouterr().out
    )


def test_a_cell_says_what_runs_in_it() -> None:
    told: list[str] = []
    timer = timing.CpuTimer(2)
    timer.tell = told.append
    timer.burst({"a": lambda: None})
    assert told == ["a, warming up", "a, round 1 of 2", "a, round 2 of 2"]


def test_peers_that_are_not_here_say_so() -> None:
    with pytest.raises(loading.MissingError, match="no_such_package does not load"):
        loading.load("no_such_package")


def test_the_budget_ends_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main([*TINY, "--seconds", "0", "--peers"]) == 1  # nothing of ours was timed
    assert "stopped after 0 s" in capsys.readouterr().out
    assert time.perf_counter() - start < 30


def test_grids_are_what_the_documentation_says() -> None:
    forward = list(GRIDS["forward"].cells())
    assert len(forward) == 36
    assert {c.batch * c.rows for c in forward} == {16384}
    assert {c.heads * c.dim for c in forward} == {2048}
    assert {c.op for c in GRIDS["backward"].cells()} == {"backward"}
    options = list(GRIDS["options"].cells())
    assert {c.option for c in options} == {"", "window", "packed", "grouped", "documents"}
    (packed,) = (c for c in options if c.option == "packed")
    assert len(packed.lengths) == 16
    assert max(packed.lengths) == 4096
    assert {c.dim for c in GRIDS["options"].cells(Asked([4096], None, "float16"))} == {64, 128, 256}
    cell = Cell("x", "forward", "bfloat16", 1, 2, 2, 10, 4, False)
    assert cell.flops == 4 * 2 * 100 * 4
    assert cell.array_bytes == 4 * 2 * 10 * 4 * 2


def test_heads_and_sequences_of_a_grid_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [1024, 2048, 4096, 8192, 16384]
    asked = list(GRIDS["forward"].cells(Asked(rows, [64, 128], heads=[8, 16, 32])))
    assert len(asked) == 2 * 30  # two masks
    assert {c.batch * c.rows for c in asked} == {16384}
    assert {(c.dim, c.heads, c.kv_heads) for c in asked} == {
        (dim, heads, heads) for dim in (64, 128) for heads in (8, 16, 32)
    }
    grouped = GRIDS["training"].cells(Asked([4096], [64], heads=[8], batch=3))
    assert {(c.option, c.kv_heads) for c in grouped if c.option in ("", "grouped")} == {
        ("", 8), ("grouped", 2)
    }  # fmt: skip
    assert {(c.batch, c.heads) for c in GRIDS["small"].cells(Asked(heads=[4], batch=2))} == {(2, 4)}
    assert main([*TINY, "--heads", "2", "3", "--batch", "2", "--peers", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {(r["batch"], r["heads_q"], r["heads_kv"]) for r in records} == {(2, 2, 2), (2, 3, 3)}


@pytest.mark.parametrize("flag", ["--heads", "--batch"])
@pytest.mark.parametrize("grid", ["options", "decode", "append"])
def test_grids_that_are_lists_have_their_own_heads(
    grid: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--grid", grid, flag, "2"]) == 2
    assert f"{flag} is for --grid forward, backward" in capsys.readouterr().err


def test_the_page_plots_every_group() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    base = dict.fromkeys(FIELDS)
    records = [
        {**base, "op": "forward", "dtype": "bfloat16", "d_qk": dim, "causal": causal, "who": who,
         "seqlen_q": rows, "case": "burst", "tflops": rows * 0.1, "peak_mib": rows * 1.0,
         "implementation": "x", "p50_ms": 1.0, "p99_ms": 1.0}
        for dim in (64, 128) for causal in (False, True) for who in ("fulmen", "naive", "<fa3>")
        for rows in (512, 1024)
    ]  # fmt: skip
    drawn = plots.over_lengths(records)
    text = page.page(records, "title <1>", "note", drawn, page.columns(records))
    assert text.count("<svg") == 5  # four groups, and memory
    assert drawn == plots.over_lengths(records)
    assert drawn[0].name == "forward-bfloat16-d-64-full"
    assert "<fa3>" not in text
    assert "title &lt;1&gt;" in text


def test_the_page_of_an_ablation_plots_the_ladder_and_each_kernel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    base = {**dict.fromkeys(FIELDS), "who": "fulmen", "versions": {"fulmen": "0"}}
    records = [
        {**base, "implementation": name, "without": without, "tflops": 100.0 * ratio,
         "ratio": ratio, "p50_ms": 1.0, "max_error": 1e-3}
        for name, without, ratio in (
            ("sm80", "", 1.0), ("sm80", "swizzle", 0.4), ("sm90", "", 1.0), ("sm90", "overlap", 0.9)
        )
    ]  # fmt: skip
    lines = tmp_path / "x.jsonl"
    drawn = plots.of_optimisations(records)
    said = page.write(lines, records, "ablation", drawn, ablation.COLUMNS)
    assert [plot.name for plot in drawn] == [
        "the-ladder-of-kernels",
        "sm80-without",
        "sm90-without",
    ]
    assert said == f"written: {lines}, .html and 3 plots as .svg and .png"
    assert (tmp_path / "x-sm80-without.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "x.html").read_text()
    assert text.count("<svg") == 3
    assert text.index("of whole") < text.index("p50 ms")


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no assembler of PTX")
def test_the_kernel_of_multiply_adds_assembles(tmp_path: Path) -> None:
    source = fma_peak.source()
    assert source.count("fma.rn.f32") == fma_peak.CHAINS * fma_peak.STEPS
    (tmp_path / "peak.ptx").write_text(source)
    for arch in ("sm_75", "sm_90"):
        subprocess.run(
            [
                "ptxas",
                "-arch",
                arch,
                str(tmp_path / "peak.ptx"),
                "-o",
                str(tmp_path / "peak.cubin"),
            ],
            check=True,
        )
