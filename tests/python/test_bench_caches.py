# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen bench --grid decode` and `paged` without a GPU: cells, bytes, pages, sides, tables."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphless_timer import GraphlessTimer

import fulmen
from fulmen.cli import bench, cache_bench
from fulmen.cli.main import main
from fulmen.cli.output import BadInputError, Output
from fulmen.lab.benchmark import cache_cells, page, peers_caches, plots, read_peak
from fulmen.lab.benchmark.append_cells import APPEND_GRIDS, AppendCell
from fulmen.lab.benchmark.append_sides import AppendTruth, FulmenAppend, IndexCopy, random_rows
from fulmen.lab.benchmark.cache_cells import CACHE_GRIDS, CacheCell
from fulmen.lab.benchmark.cache_ratios import ratios
from fulmen.lab.benchmark.cache_sides import (
    CacheTruth,
    FulmenApart,
    FulmenCaches,
    FulmenCascade,
    FulmenHeadsFirst,
    FulmenInvariant,
    pages_of,
    random_caches,
)
from fulmen.lab.benchmark.cells import Asked
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.records import Run


def mixed_cell() -> CacheCell:
    return CacheCell(
        "test", "forward", "float32", 4, 4, 2, 3, 8, True,
        kv_lengths=(9, 5, 3, 8), q_lengths=(1, 1, 3, 2), page=4,
    )  # fmt: skip


def cascade_cell() -> CacheCell:
    return CacheCell(
        "test", "forward", "float32", 3, 4, 2, 1, 8, False,
        kv_lengths=(69, 73, 68), page=4, shared=64,
    )  # fmt: skip


def cell_of(rows: int, keys: tuple[int, ...], page: int, dtype: str = "float32") -> CacheCell:
    return CacheCell(
        "test", "forward", dtype, len(keys), 4, 2, rows, 8, rows > 1, kv_lengths=keys, page=page
    )


def test_grids_are_what_the_documentation_says() -> None:
    decode = list(CACHE_GRIDS["decode"].cells())
    assert [(c.batch, c.kv_rows, c.rows) for c in decode] == [
        (1, 4096, 1), (1, 65536, 1), (8, 8192, 1), (32, 8192, 1), (128, 4096, 1),
        (128, max(cache_cells.drawn_lengths()), 1), (8, 32768, 1), (8, 32768, 4),
    ]  # fmt: skip
    assert {(c.heads, c.kv_heads, c.dim, c.dtype, c.page) for c in decode} == {
        (32, 8, 128, "bfloat16", 0)
    }
    assert all(c.graph and c.causal == (c.rows > 1) for c in decode)
    drawn = decode[5].kv_lengths
    assert not decode[5].is_even
    assert 128 <= min(drawn) < 512
    assert 7680 < max(drawn) <= 8192
    assert drawn == cache_cells.drawn_lengths()
    paged = list(CACHE_GRIDS["paged"].cells())
    assert [c.page for c in paged] == [16] * 8 + [64] * 8 + [1] * 8
    asked = list(CACHE_GRIDS["paged"].cells(Asked([8192], [64, 256], "float16", [1, 16], [32])))
    assert len(asked) == 8
    assert {(c.kv_heads, c.dim, c.dtype, c.page) for c in asked} == {
        (heads, dim, "float16", 32) for heads in (32, 2) for dim in (64, 256)
    }

    mixed = list(CACHE_GRIDS["mixed"].cells())
    assert [(c.batch, c.rows, sum(c.q_rows), c.page) for c in mixed] == [
        (66, 2048, 64 + 4096, 16), (2, 2048, 4096, 16), (64, 1, 64, 16),
    ]  # fmt: skip
    assert [c.shape.split(" heads")[0] for c in mixed] == [
        "66x8192 q 1, 2 chunks of 2048", "2x8192 q 1, 2 chunks of 2048", "64x8192",
    ]  # fmt: skip
    (cascade,) = CACHE_GRIDS["cascade"].cells()
    assert (cascade.batch, cascade.kv_rows, cascade.shared, cascade.page) == (64, 16896, 16384, 16)
    narrow = list(CACHE_GRIDS["decode"].cells(Asked(dtype="int8")))
    assert {(c.dtype, c.kv_dtype, c.shape.endswith("D 128 int8")) for c in narrow} == {
        ("bfloat16", "int8", True)
    }
    append = list(APPEND_GRIDS["append"].cells())
    assert [(c.rows, c.option) for c in append] == [
        (64, ""), (1024, ""), (16384, ""), (64, "rotary"), (1024, "rotary"), (16384, "rotary"),
    ]  # fmt: skip
    assert [c.array_bytes for c in append[::3]] == [64 * 8192, 64 * (8192 + 16384)]


def test_bytes_and_arithmetic() -> None:
    cell = cell_of(3, (9, 20), 4, "bfloat16")
    assert cell.array_bytes == 2 * (2 * (2 * 3 * 4 * 8) + 2 * ((9 + 20) * 2 * 8))
    pairs = sum(i + 1 for keys in (9, 20) for i in range(keys - 3, keys))
    assert cell.flops == 4 * 4 * 8 * pairs
    assert cell.pages == (3, 5)
    assert cell.name == "test bfloat16 2x9..20 q 3 heads 4/2 D 8 page 4"
    assert cell_of(1, (9, 9), 0).flops == 4 * 4 * 8 * 18


def test_pages_are_shuffled_and_no_request_shares_one() -> None:
    cell = cell_of(1, (37, 1, 64), 4)
    table, indptr, pages = pages_of(cell)
    assert sorted(pages) == list(range(10 + 1 + 16))
    assert list(pages) != sorted(pages)
    assert table.shape == (3, 16)
    for row, begin, end in zip(table, indptr, indptr[1:]):
        assert np.array_equal(row[: end - begin], pages[begin:end])
        assert set(row[end - begin :]) <= {pages[begin]}


def test_shared_pages_are_counted_once() -> None:
    cell = cascade_cell()
    table, indptr, pages = pages_of(cell)
    assert cell.num_pages == 16 + 2 + 3 + 1
    assert sorted(set(pages)) == list(range(cell.num_pages))
    assert (table[:, :16] == table[0, :16]).all()
    assert list(np.diff(indptr)) == [18, 19, 17]
    own = (64 + 5 + 9 + 4) * 2 * 8
    assert cell.array_bytes == 4 * (2 * (3 * 4 * 8) + 2 * own)
    assert "3x68..73 64 shared heads" in cell.shape


@pytest.fixture
def shims() -> Iterator[None]:
    """The names of the peers' packages, answered by fulmen's own modules of their calls."""
    pytest.importorskip("torch", reason="torch is not installed")
    from fulmen.compat import flash_attn, flashinfer

    flash_attn.install()
    sys.modules["flashinfer"] = flashinfer
    try:
        yield
    finally:
        del sys.modules["flashinfer"]
        flash_attn.uninstall()


@pytest.mark.parametrize("page_size", [0, 1, 4])
@pytest.mark.parametrize("keys", [(9, 9), (5, 13, 8)])
@pytest.mark.parametrize("rows", [1, 3])
def test_sides_are_right_or_say_what_they_lack(
    shims: None, rows: int, keys: tuple[int, ...], page_size: int
) -> None:
    import torch

    cell = cell_of(rows, keys, page_size)
    caches = random_caches(cell, torch, "cpu")
    truth = CacheTruth(cell, caches, torch)
    lacking = {
        "math": page_size or len(keys) > 2 or rows > 1,
        "fa4": not page_size and len(keys) > 2,
        "flashinfer": not page_size,
    }
    sides = (
        FulmenCaches(), peers_caches.SdpaCaches("math", "MATH"),
        peers_caches.FlashAttention2Caches(), peers_caches.FlashAttention3Caches(None, False),
        peers_caches.FlashAttention3Caches(None, True), peers_caches.FlashAttention4Caches(),
        peers_caches.FlashInferCaches(),
    )  # fmt: skip
    for side in sides:
        if lacking.get(side.name):
            with pytest.raises(
                MissingError, match=r"it takes no|it takes len|its caches|its causal"
            ):
                side.answer(cell, caches)
            continue
        answer = side.answer(cell, caches)
        got = answer.results(answer.call())
        assert truth.error(got) < 1e-5, side.name
        wrong = got[0].clone()
        request, head = next(iter(truth.wanted))
        wrong[request, rows - 1, head, 3] += 0.5
        assert math.isclose(truth.error((wrong,)), 0.5, abs_tol=1e-4)
        wrong[request, rows - 1, head, 3] = math.nan
        assert math.isnan(truth.error((wrong,)))


def test_a_mixed_cell_whole_and_in_two_halves(shims: None) -> None:
    import torch

    cell = mixed_cell()
    caches = random_caches(cell, torch, "cpu")
    truth = CacheTruth(cell, caches, torch)
    assert {request for request, _ in truth.wanted} >= {2}  # the longest chunk
    sides = (FulmenCaches(), FulmenApart(), peers_caches.FlashAttention3Caches(None, False),
             peers_caches.FlashAttention3Caches(None, True), peers_caches.FlashAttention4Caches(),
             peers_caches.FlashInferCaches())  # fmt: skip
    for side in sides:
        answer = side.answer(cell, caches)
        got = answer.results(answer.call())
        assert truth.error(got) < 1e-5, side.name
        got[0][2] = math.nan
        assert math.isnan(truth.error(got)), side.name
    with pytest.raises(MissingError, match="no packed queries"):
        peers_caches.FlashAttention2Caches().answer(cell, caches)
    with pytest.raises(MissingError, match="of one kind"):
        FulmenApart().answer(cell_of(1, (3, 4), 4), caches)
    fulmen.warmup([{**FulmenCaches().problem(cell), "backend": "cpu"}])


def test_keys_that_requests_share(shims: None) -> None:
    import torch

    cell = cascade_cell()
    caches = random_caches(cell, torch, "cpu")
    truth = CacheTruth(cell, caches, torch)
    for side in (FulmenCaches(), FulmenCascade(), peers_caches.FlashInferCascade()):
        answer = side.answer(cell, caches)
        assert truth.error(answer.results(answer.call())) < 1e-5, side.name
    with pytest.raises(MissingError, match="share no keys"):
        FulmenCascade().answer(cell_of(1, (3, 4), 4), caches)
    with pytest.raises(MissingError, match="shared pages"):
        peers_caches.FlashInferCascade().answer(cell_of(1, (3, 4), 4), caches)
    fulmen.warmup([{**FulmenCascade().problem(cell), "backend": "cpu"}])


@pytest.mark.parametrize("dtype", cache_cells.QUANTISED_BYTES)
@pytest.mark.parametrize("page_size", [0, 4])
def test_quantised_caches(shims: None, dtype: str, page_size: int) -> None:
    import torch

    cell = replace(cell_of(1, (9, 20), page_size), option=dtype)
    assert cell.array_bytes == 4 * 2 * (2 * 4 * 8) + 2 * 29 * 2 * 8
    caches = random_caches(cell, torch, "cpu")
    assert str(caches.k.dtype) == f"torch.{dtype}"
    truth = CacheTruth(cell, caches, torch)
    sides = (FulmenCaches(), FulmenInvariant(), FulmenHeadsFirst(), peers_caches.FlashInferCaches())
    for side in sides:
        if dtype not in side.options or (side.name == "flashinfer" and not page_size):
            continue
        answer = side.answer(cell, caches)
        assert truth.error(answer.results(answer.call())) < 1e-5, side.name
    fulmen.warmup([{**FulmenCaches().problem(cell), "backend": "cpu"}])


@pytest.mark.parametrize("option", ["", "rotary"])
def test_appended_rows(option: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cell = AppendCell("test", "append", "float32", 1, 4, 2, 37, 8, False, option=option, page=4)
    rows = random_rows(cell, torch, "cpu")
    truth = AppendTruth(cell, rows, torch)
    for side in (FulmenAppend(), IndexCopy()):
        if option not in side.options:
            continue
        answer = side.answer(cell, rows)
        assert truth.error(answer.results(answer.call())) < 1e-6, side.name
        got = answer.results(answer.call())
        got[0].view(-1, 2, 8)[rows.slots[5], 1, 3] = math.nan
        assert math.isnan(truth.error(got)), side.name


@pytest.mark.parametrize("page_size", [0, 4])
def test_kernels_of_cells_are_compiled_before_them(page_size: int) -> None:
    problem = FulmenCaches().problem(cell_of(3, (5, 13, 8), page_size))
    assert ("page_table" in problem) == bool(page_size)
    fulmen.warmup([{**problem, "backend": "cpu"}])


class Reads:
    """Stands for the plain reads of a GPU."""

    def calls(self, count: int) -> dict[str, Any]:
        return {"slow": lambda: sum(range(3000)), "quick": lambda: sum(range(300))}


def cache_bench_on_the_cpu() -> cache_bench.CacheBench:
    import torch

    bench = cache_bench.CacheBench.__new__(cache_bench.CacheBench)
    bench.grid = CACHE_GRIDS["decode"]
    bench.backend = bench.device = "cpu"
    bench.output = Output(False)
    bench.say = lambda now: None
    bench.sustained = False
    bench.missing = {}
    bench.peak = Reads()
    bench.torch = torch
    bench.timer = GraphlessTimer(3)
    bench.common = Run("cpu")
    bench.sides = [FulmenCaches(), peers_caches.SdpaCaches("cudnn", "MATH")]
    return bench


def test_records_tables_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    bench = cache_bench_on_the_cpu()
    cells = [cell_of(1, (9, 9), 0), cell_of(1, (128,) * 100 + (8192,), 64)]
    records = [record for cell in cells for record in bench.run(cell)]
    assert [r["who"] for r in records] == ["fulmen", "cudnn", "fulmen"]
    assert list(bench.missing.values()) == [
        f"cudnn is left out of {cells[1].name}: it takes no table of pages"
    ]
    for r, cell in zip(records, (cells[0], cells[0], cells[1])):
        assert (r["case"], r["page"], r["seqlen_q"]) == ("graph", cell.page, 1)
        assert (r["kv_total"], r["seqlen_kv"]) == (sum(cell.kv_lengths), max(cell.kv_lengths))
        assert r["read_by"] == "quick"
        assert math.isclose(r["of_read"], r["read_ms"] / r["p50_ms"])
        assert math.isclose(r["gbps"], cell.array_bytes / r["p50_ms"] / 1e6)
        assert r["max_error"] < 1e-5
    tables = list(bench.tables(records))
    assert [len(rows) for _, _, rows in tables] == [2, 1]
    assert tables[0][2][0][5] == f"{records[0]['p50_ms'] / records[0]['read_ms']:.3f}"
    assert "101x128..8192 heads 4/2 D 8 page 64; a plain read" in tables[1][0]
    for title, columns, rows in tables:
        bench.output.line(title)
        bench.output.table(columns, rows)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    drawn = bench.plots(records)
    text = page.page(records, "caches", "note", drawn, bench.columns(records))
    assert text.count("<tr") == len(records) + 1
    assert text.count("<svg") == (0 if plots.NO_PLOTS in text else 2)


def test_ratios_are_of_cells_that_differ_in_one_thing() -> None:
    common = {"heads_kv": 8, "d_qk": 128, "dtype": "bfloat16", "case": "graph", "causal": False}
    made = []

    def add(who: str, ms: float, gbps: float = 1.0, **members: Any) -> None:
        cell = {
            "batch": 8, "seqlen_q": 1, "seqlen_kv": 32, "kv_total": 256, "page": 16, "option": "",
            "is_even": True, "packed": False, **members,
        }  # fmt: skip
        shape = " ".join(str(cell[name]) for name in ("kv_total", "seqlen_q", "page", "option"))
        made.append({**common, **cell, "who": who, "p50_ms": ms, "gbps": gbps, "shape": shape})

    add("fulmen", 2.0, 4.0)
    add("fulmen invariant", 3.0)
    add("fa3", 1.0)
    add("fulmen", 2.2, seqlen_q=4, causal=True)
    add("fulmen", 2.4, page=1)
    add("fulmen", 1.0, option="int8")
    add("fulmen", 1.8, 3.2, kv_total=200, is_even=False)
    assert [(x.what, round(x.times, 6)) for x in ratios(made)] == [
        ("4 query rows, of one", 1.1), ("page 1, of page 16", 1.2),
        ("caches of bfloat16, of int8", 2.0), ("drawn lengths, of equal ones a byte", 1.25),
        ("fulmen invariant, of fulmen", 1.5),
    ]  # fmt: skip


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--grid", "cpu", "--page-sizes", "16"]) == 2
    assert (
        "--page-sizes is for --grid decode, paged, mixed, cascade, cpu-decode, append, not cpu"
        in capsys.readouterr().err
    )
    assert main(["bench", "--grid", "forward", "--groups", "1"]) == 2
    assert (
        "--groups is for --grid decode, paged, mixed, cascade, cpu-decode, append, not forward"
        in capsys.readouterr().err
    )
    assert main(["bench", "--grid", "decode", "--page-sizes", "16"]) == 2
    assert "--grid decode has no pages; --grid paged has" in capsys.readouterr().err
    assert main(["bench", "--grid", "append", "--dtype", "int8"]) == 2
    assert "int8 is for --grid decode, paged, mixed, not append" in capsys.readouterr().err
    assert main(["bench", "--grid", "decode", "--groups", "3"]) == 2
    assert "32 query heads cannot share keys 3 to one" in capsys.readouterr().err
    bench = cache_bench.CacheBench.__new__(cache_bench.CacheBench)
    bench.backend, bench.torch = "cuda", object()
    bench.backend, bench.missing, bench.sides = "cuda", {}, []
    bench.grid = CACHE_GRIDS["decode"]
    with pytest.raises(BadInputError, match="--precision is for float32"):
        bench.ours(argparse.Namespace(precision=["tf32"], implementation=None))
    for name, reason in (
        ("naive", "caches are timed beside cudnn, fa2, flash-attn, fa3, fa3"),
        ("fa3", "/no/such/_C.so does not load"),
    ):
        bench._add(name, "/no/such/_C.so")
        assert bench.missing[name].startswith(f"{name} is left out: {reason}")
    assert bench.sides == []


def test_a_grid_of_caches_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--grid", "decode"]) == 2
    assert "GPU" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no assembler of PTX")
def test_the_kernels_of_reads_assemble(tmp_path: Path) -> None:
    loads = read_peak.loads()
    assert loads.count("ld.global.nc") == read_peak.IN_FLIGHT
    sources = [("sm_75", loads), ("sm_90", loads)]
    for _, stages in read_peak.COPIES:
        copies = read_peak.copies(stages)
        assert copies.count("cp.async.bulk") == stages
        sources.append(("sm_90", copies))
    for index, (arch, source) in enumerate(sources):
        text = tmp_path / f"{index}.ptx"
        text.write_text(source)
        made = text.with_suffix(".cubin")
        subprocess.run(["ptxas", "-arch", arch, str(text), "-o", str(made)], check=True)


def test_a_tiny_grid_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    grid = CACHE_GRIDS["cpu-decode"]
    assert (grid.backend, grid.pages, grid.groups) == ("cpu", (0, 16), (1, 4, 8))
    tiny = cache_cells.CacheGrid("cpu-decode", (0, 16), "cpu", cases=(((1,), (40, 40)),))
    monkeypatch.setitem(bench.SERVING_GRIDS, "cpu-decode", tiny)
    assert main(["bench", "--grid", "cpu-decode", "--rounds", "2", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {r["who"] for r in records} == {"fulmen", "torch", "torch grouped"}
    assert [r["page"] for r in records if r["who"] == "fulmen"] == [0, 16]
    for r in records:
        assert r["case"] == "burst"
        assert r["max_error"] < 0.05  # of bfloat16
        assert 0 < r["of_read"] <= r["of_bound"]
        assert math.isclose(
            r["of_bound"],
            max(r["read_ms"], r["tflops"] * r["p50_ms"] / r["peak_tflops"]) / r["p50_ms"],
        )
