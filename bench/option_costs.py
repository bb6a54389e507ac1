# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What each option costs beside the plain call, in one run on one GPU.

    python bench/option_costs.py --op backward --implementation sm80 -o bench/results

All options of a head dimension are timed together as `fulmen bench` times its sides (random order,
idle gaps, a flushed L2; the median over rounds of medians): only the ratio to the plain call
counts. One JSON object a line, with the option as its `case`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fulmen
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run, write_lines
from fulmen.lab.benchmark.timing import GpuTimer
from fulmen.masks import documents


def options_of(cell: Cell) -> dict[str, dict[str, Any]]:
    """The arguments of each option, by name; "plain" first."""
    pairs = (1, cell.heads, cell.rows, cell.rows)
    ids = torch.arange(cell.rows, device="cuda", dtype=torch.int32) // (cell.rows // 8)
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": cell.rows // 16},
        "documents": {"mask": documents(ids, ids)},
        "mask": {"mask": torch.rand(pairs, device="cuda") < 0.9},
        "bias": {"bias": torch.randn(pairs, device="cuda", dtype=torch.bfloat16)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.logspace(-1, -8, cell.heads, base=2.0, device="cuda")},
        "sinks": {"sinks": torch.randn(cell.heads, device="cuda")},
        "dropout": {"dropout_p": 0.1, "rng": (1, 0)},
        "deterministic": {"deterministic": True},
    }


def call_of(
    cell: Cell, tensors: list[torch.Tensor], need: tuple[str, ...], options: dict[str, Any]
) -> Callable[[], Any]:
    """One call of the library, run once."""
    q, k, v, do = tensors
    made = fulmen.attention_forward(q, k, v, **options)
    if cell.op == "forward":
        return lambda: fulmen.attention_forward(q, k, v, out=made.o, **options)
    return lambda: fulmen.attention_backward(do, q, k, v, made.o, made.stats, need=need, **options)


def calls(cell: Cell, implementation: str, names: list[str]) -> dict[str, Callable[[], Any]]:
    """A call for each option that the implementation has."""
    shape = (cell.batch, cell.heads, cell.rows, cell.dim)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found: dict[str, Callable[[], Any]] = {}
    for name, options in options_of(cell).items():
        if names and name not in names and name != "plain":
            continue
        given = {**options, "implementation": implementation}
        try:
            found[name] = call_of(cell, tensors, ("q", "k", "v"), given)
            if cell.op == "backward" and name == "bias":
                found["bias and dbias"] = call_of(cell, tensors, ("q", "k", "v", "bias"), given)
        except fulmen.UnsupportedError as error:
            print(f"{name}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=("forward", "backward"), default="forward")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--options", nargs="*", default=[], help="beside plain; all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    timer, run = GpuTimer(arguments.rounds), Run("cuda")
    records = []
    for dim in arguments.dims:
        heads = 2048 // dim
        cell = Cell(
            "options", arguments.op, "bfloat16", 1, heads, heads, arguments.rows, dim, False
        )
        times = timer.burst(calls(cell, arguments.implementation, arguments.options))
        for name, each in times.items():
            record = run.record(cell, "fulmen", arguments.implementation, each, name)
            record["of_plain"] = each.median / times["plain"].median
            print(
                f"d {dim} {name:15} {record['p50_ms']:8.3f} ms  {record['of_plain']:5.2f} of plain"
            )
            records.append(record)
    if arguments.output:
        print(write_lines(arguments.output, f"options-{arguments.op}", records))


if __name__ == "__main__":
    main()
