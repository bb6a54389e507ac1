# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the host is busy with one call on a GPU, through C and through Python.

python bench/host/host.py [-o bench/results] [--jax]

C: host.cpp beside this file, compiled with c++ and run against the library that Python uses: calls,
the driver's own share of them, and the first call of a process with an empty kernel cache and with
a filled one. Python: fulmen.attention on PyTorch tensors beside torch's own attention, in random
order, and with --jax on JAX arrays. Written as DATE-host-CARD.jsonl, one record a line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fulmen
from fulmen.cli.benchmark.cells import Cell
from fulmen.cli.benchmark.records import Run, write_lines
from fulmen.cli.benchmark.timing import Times

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent.parent / "include"
ROUNDS = 40
CALLS = 50


def cell_of(op: str, dtype: str, causal: bool, rows: int = 128) -> Cell:
    """The problem of every row: so small that the kernel is shorter than its launch."""
    return Cell("host", op, dtype, 1, 8, 8, rows, 64, causal)


def record(run: Run, cell: Cell, who: str, implementation: str, times: Times, case: str) -> Any:
    """A record without rates: they would say nothing of the host."""
    made = run.record(cell, who, implementation, times, case)
    return {**made, "tflops": None, "gbps": None, "min_ms": min(times.every) * 1e3}


def lines_of(program: Path, mode: str, **environment: str) -> list[dict[str, Any]]:
    """What host.cpp says, a dict a line."""
    done = subprocess.run(
        [str(program), mode], capture_output=True, text=True, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def through_c(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The rows of host.cpp."""
    program = folder / "host"
    info = fulmen.build_info()
    soname = "libfulmen.so." + info["version"].rpartition(".")[0]  # its name to the loader
    library = folder / soname
    library.symlink_to(Path(info["library"]).resolve())
    subprocess.run(
        ["c++", "-std=c++20", "-O2", f"-I{INCLUDE}", str(HERE / "host.cpp"), str(library),
         f"-Wl,-rpath,{folder}", "-ldl", "-o", str(program)], check=True,
    )  # fmt: skip
    cache = {"FULMEN_CACHE_DIR": str(folder / "cache")}
    runs = (
        ("first", ", empty cache", cache),
        ("first", ", filled cache", cache),
        ("calls", "", {}),
    )
    found = []
    for mode, note, environment in runs:
        for line in lines_of(program, mode, **environment):
            rows = 512 if mode == "first" else 128
            op, dtype = line["op"] or "forward", line["dtype"] or "bfloat16"
            seconds = [line[key] / 1e6 for key in ("p50_us", "min_us", "p99_us") if key in line]
            times = Times(seconds[:1], seconds)
            who = "fulmen" if line["implementation"] else "driver"
            cell = cell_of(op, dtype, mode == "first", rows)
            found.append(
                record(run, cell, who, line["implementation"] or "libcuda", times,
                       line["case"] + note)
            )  # fmt: skip
    return found


def time_sides(sides: Mapping[str, Callable[[], Any]], wait: Callable[[], Any]) -> dict[str, Times]:
    """Seconds of a call of each side, in bursts with a wait between them, in random order."""
    found = {name: Times() for name in sides}
    for call in sides.values():
        for _ in range(CALLS):
            call()
    for _ in range(ROUNDS):
        for name in random.sample(list(sides), len(sides)):
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                sides[name]()
            seconds = (time.perf_counter() - start) / CALLS
            found[name].every.append(seconds)
    for times in found.values():
        times.medians.append(statistics.median(times.every))
    return found


def through_torch(run: Run) -> list[dict[str, Any]]:
    """fulmen and torch's own attention, without and with gradients."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    leaves = [
        torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    plain = [x.detach() for x in leaves]
    do = torch.ones_like(plain[0])

    attend: dict[str, Callable[[list[Any]], Any]] = {
        "fulmen": lambda arrays: fulmen.attention(*arrays, causal=True),
        "torch": lambda arrays: sdpa(*arrays, is_causal=True),
    }

    def train(who: str) -> None:
        for x in leaves:
            x.grad = None
        attend[who](leaves).backward(do)

    steps: dict[str, Callable[[str], Any]] = {
        "forward, no gradients": lambda who: attend[who](plain),
        "forward": lambda who: attend[who](leaves),
        "forward and backward": train,
    }
    found = []
    for step, call in steps.items():
        sides = {who: partial(call, who) for who in attend}
        for who, times in time_sides(sides, torch.cuda.synchronize).items():
            case = f"host time of a call, Python on torch tensors, {step}"
            op = "backward" if step == "forward and backward" else "forward"
            how = "scaled_dot_product_attention"
            if who == "fulmen":
                how = fulmen.explain(*plain, operation=op, causal=True)["implementation"]
            found.append(record(run, cell_of(op, "bfloat16", True), who, how, times, case))
    return found


def through_jax(run: Run) -> list[dict[str, Any]]:
    """fulmen.attention on JAX arrays."""
    import jax

    q, k, v = (jax.numpy.ones((1, 8, 128, 64), jax.numpy.float32) for _ in range(3))
    sides = {"fulmen": lambda: fulmen.attention(q, k, v, causal=True)}
    times = time_sides(sides, lambda: sides["fulmen"]().block_until_ready())["fulmen"]
    how = fulmen.explain(q, k, v, causal=True)["implementation"]
    case = "host time of a call, Python on JAX arrays"
    return [record(run, cell_of("forward", "float32", True), "fulmen", how, times, case)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    parser.add_argument("--jax", action="store_true", help="also JAX arrays")
    asked = parser.parse_args()
    run = Run("cuda")
    with tempfile.TemporaryDirectory() as folder:
        records = through_c(run, Path(folder))
    records += through_torch(run)
    if asked.jax:
        records += through_jax(run)
    for r in records:
        print(f"{r['case']:62} {r['who']:8} {r['implementation']:30} {r['op']:8} {r['dtype']:9}"
              f" {r['p50_ms'] * 1e3:10.2f} us, least {r['min_ms'] * 1e3:10.2f}")  # fmt: skip
    if asked.output is not None:
        print(write_lines(asked.output, "host", records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
