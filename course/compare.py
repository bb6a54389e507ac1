# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen learn compare`: every rung from the score matrix to the tensor cores, in one table.

The rungs in Python and Triton are the files of examples/ladder, those in C++ and CUDA are fulmen's
implementations, and torch's attention stands beside them. All are timed in random order by what
`fulmen bench` times with, errors are against float64. Before each shape stands what it asks of a
card by the roofline of chapter 1, which needs no card.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import fulmen
from fulmen.cli import io_model
from fulmen.cli.bench import Bench, cell_name, write
from fulmen.cli.benches import error_text
from fulmen.cli.output import ACCEPTABLE, BadInputError, Output, bytes_text, seconds_text
from fulmen.lab.benchmark.cells import ITEM_BYTES, Cell
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.peers_torch import leaves
from fulmen.lab.benchmark.records import figure, is_ours, rate_of
from fulmen.lab.benchmark.sides import Answer, Fulmen, NaiveNumpy, Side, Tensors, autograd_answer

from .cards import H200
from .device import ROOT

LADDER = ROOT / "examples" / "ladder"
FILES = {"naive": "naive", "chunked": "chunked", "triton": "triton_backward"}
# Rows, head dim and heads. A CPU takes minutes for the larger ones.
SHAPES = {"cpu": ((1024, 64, 8),), "cuda": ((1024, 64, 8), (2048, 128, 12), (4096, 128, 16))}
IMPLEMENTATIONS = {"cpu": ("tiled",), "cuda": ("naive", "simt", "sm80", "sm90")}
ROUNDS = {"cpu": 2, "cuda": 5}
TILE = 128  # rows and keys, of the account
MOST_NAIVE_FLOPS = 1e10  # of a backward pass, which takes CUDA from the equations a second then
MATRICES = {"forward": 3, "backward": 5}  # of all pairs, that the plain way holds at once


class Rung(Side):
    """A function of q, k, v and causal, whose gradients autograd knows."""

    def __init__(self, name: str, attention: Callable[..., Any], source: str) -> None:
        """By its name, and by the file that it stands in."""
        self.name, self._attention, self._source = name, attention, source

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        needed = MATRICES[cell.op] * cell.heads * cell.rows**2 * ITEM_BYTES[cell.dtype]
        if self.name == "naive" and needed > (free := _free_bytes(tensors.q.is_cuda)):
            raise MissingError(
                f"its score matrices would take {bytes_text(needed)}, and {bytes_text(free)} are "
                "free"
            )
        if self.name == "chunked" and cell.op == "backward":
            raise MissingError("autograd would keep the scores of every chunk")
        if cell.op == "forward":
            q, k, v = tensors.q, tensors.k, tensors.v
            return Answer(
                lambda: self._attention(q, k, v, cell.causal), lambda o: (o,), self._source
            )
        inputs = leaves(tensors)
        o = self._attention(*inputs, cell.causal)
        return autograd_answer(o, inputs, tensors.do, self._source)


class Implementation(Fulmen):
    """One of fulmen's own, by name."""

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        slow = self.asked == "naive" and cell.op == "backward"
        if slow and cell.flops > MOST_NAIVE_FLOPS:
            raise MissingError("it would take seconds: every thread computes its scores anew")
        return super().answer(cell, tensors)


def _free_bytes(on_gpu: bool) -> int:
    if on_gpu:
        torch: Any = importlib.import_module("torch")
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_ladder(name: str, on_gpu: bool) -> Side:
    """A file of examples/ladder.

    Raises:
        MissingError: it needs what is not here.
    """
    file = FILES[name]
    if name == "triton":
        if not on_gpu:
            raise MissingError(
                "it runs on a GPU; TRITON_INTERPRET=1 python examples/ladder/triton_backward.py "
                "checks it without one"
            )
        if importlib.util.find_spec("triton") is None:
            raise MissingError("triton is not installed")
    sys.path.insert(0, str(LADDER))
    try:
        return Rung(name, importlib.import_module(file).attention, f"{file}.py")
    finally:
        sys.path.remove(str(LADDER))


class Compare(Bench):
    """The rungs as sides of a benchmark."""

    @property
    def defaults(self) -> tuple[str, ...]:
        return (*FILES, "torch")

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        return [Implementation(name) for name in IMPLEMENTATIONS[self.backend]]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if self.torch is None:
            if name != "naive":
                raise MissingError("torch is not installed")
            return NaiveNumpy()
        if name == "torch":
            attention = self.torch.nn.functional.scaled_dot_product_attention
            return Rung(name, partial(_by_torch, attention), "its own choice")
        return _of_ladder(name, self.backend == "cuda")

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        return {}

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        unit, scale = rate_of(records)
        titles = ("who", "kernel", "p50 ms", "x naive", unit, "peak MiB", "error")
        for name, group in groupby(records, cell_name):
            found = list(group)
            plain = next((r["p50_ms"] for r in found if r["who"] == "naive"), None)
            yield name, titles, [
                (r["who"], r["implementation"], figure(r["p50_ms"]),
                 figure(plain and plain / r["p50_ms"]), figure(scale * r["tflops"]),
                 figure(r["peak_mib"]), error_text(r["max_error"]))
                for r in found
            ]  # fmt: skip


def _by_torch(attention: Callable[..., Any], q: Any, k: Any, v: Any, causal: bool) -> Any:
    return attention(q, k, v, is_causal=causal)


def account(cell: Cell) -> str:
    """What a cell asks of a card: operations, bytes with the matrix and in tiles, least times."""
    rows, size = cell.rows, ITEM_BYTES[cell.dtype]
    call = io_model.Call(rows, rows, cell.heads, cell.kv_heads, cell.dim, cell.dim, size,
                         cell.heads * rows * rows, cell.causal)  # fmt: skip
    arrays = io_model.naive(call._replace(pairs=0), cell.op)
    # naive.py makes whole matrices, in the type of the inputs.
    matrix = arrays + (io_model.naive(call, cell.op) - arrays) * size // io_model.FLOAT_BYTES
    tiles = io_model.tiled(call, cell.op, TILE, TILE)
    rate = H200.float32_flops if size > 2 else H200.flops
    least = [cell.flops / rate, *(moved / H200.bytes_per_second for moved in (matrix, tiles))]
    products, with_matrix, in_tiles = map(seconds_text, least)
    return (
        f"{cell.flops / 1e9:.3g} GFLOP; {bytes_text(matrix)} with the matrix, {bytes_text(tiles)} "
        f"in tiles of {TILE}; an {H200.name} needs {products} for the products, {with_matrix} and "
        f"{in_tiles} for the bytes"
    )


def cells_of(arguments: argparse.Namespace, backend: str) -> list[Cell]:
    """The problems of a call, forward and backward of each shape."""
    dtype = arguments.dtype or ("float32" if backend == "cpu" else "bfloat16")
    ops = ("forward",) if arguments.forward else ("forward", "backward")
    return [
        Cell("ladder", op, dtype, 1, heads, heads, rows, dim, bool(arguments.causal))
        for rows, dim, heads in arguments.shape or SHAPES[backend]
        for op in ops
    ]


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command, in a checkout."""
    has_gpu = bool(fulmen.gpu_info()["devices"])
    if arguments.on == "emulator" or (arguments.on == "gpu" and not has_gpu):
        raise BadInputError("compare takes times: on a GPU where one is, else on the CPU")
    backend = "cuda" if has_gpu else "cpu"
    arguments = argparse.Namespace(
        **{**vars(arguments), "rounds": arguments.rounds or ROUNDS[backend]},
        sustained=False, peers=None, fa3_operators=None,
    )  # fmt: skip
    bench = Compare(backend, arguments, output)
    cells = cells_of(arguments, backend)
    bench.compile(cells)
    records: list[dict[str, Any]] = []
    for cell in cells:
        with output.progress(cell.name, 1) as advance:
            bench.say = partial(advance, 0)
            found = bench.run(cell)
        records += found
        for name, columns, rows in bench.tables(found):
            output.line(name)
            output.line(account(cell))
            output.table(columns, rows, lambda row: ACCEPTABLE if is_ours(row[0]) else "")
            output.line()
    for line in bench.missing.values():
        output.line(line)
    if backend == "cpu":
        output.line(
            "times are of this CPU, larger shapes by --shape; fulmen learn 5, 6 and 8 count what "
            "kernels of a GPU move"
        )
    if arguments.output is not None and records:
        write(bench, arguments.output, "ladder", records, output)
    if output.as_json:
        output.json(records)
    return int(not any(is_ours(r["who"]) for r in records))
