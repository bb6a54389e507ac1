# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the host is busy with one call on a GPU, through C and through Python.

python bench/host/host.py [-o bench/results] [--jax]

C: host.cpp beside this file, compiled with CXX or c++ and run against the library that Python uses:
calls, and the driver's own share of them. The first call of a process, through C and Python, on two
cores, with an empty kernel cache and with a filled one. Python: fulmen.attention on PyTorch tensors
beside torch's own attention, in random order, and with --jax on JAX arrays. Written as
DATE-host-CARD.jsonl, one record a line, anew after each part.
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
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run, write_lines
from fulmen.lab.benchmark.timing import Times

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


def lines_of(*command: str, **environment: str) -> list[dict[str, Any]]:
    """What a program says, a dict a line."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment}
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def records_of(run: Run, lines: list[dict[str, Any]], rows: int, note: str = "") -> list[Any]:
    """Records of what host.cpp or first_call.py said of calls with so many rows."""
    found = []
    for line in lines:
        seconds = [line[key] / 1e6 for key in ("p50_us", "min_us", "p99_us") if key in line]
        times, case = Times(seconds[:1], seconds), line["case"] + note
        if line["op"]:
            cell = cell_of(line["op"], line["dtype"], bool(note), rows)
            found.append(record(run, cell, "fulmen", line["implementation"], times, case))
        else:
            made = record(run, cell_of("forward", "bfloat16", False), "driver", "", times, case)
            found.append({**made, "op": "launch", "dtype": "none", "implementation": "libcuda"})
    return found


def built(folder: Path) -> str:
    """host.cpp as a program in a folder, with the library that Python uses."""
    info = fulmen.build_info()
    soname = "libfulmen.so." + info["version"].partition(".")[0]  # its name to the loader
    library = folder / soname
    library.symlink_to(Path(info["library"]).resolve())
    program = str(folder / "host")
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", f"-I{INCLUDE}", str(HERE / "host.cpp"),
         str(library), f"-Wl,-rpath,{folder}", "-ldl", "-o", program], check=True,
    )  # fmt: skip
    return program


def first_calls(run: Run, program: str, folder: Path) -> list[Any]:
    """First calls of processes on two cores, with an empty kernel cache and with a filled one."""
    found = []
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        for command in ((program, "first"), (sys.executable, str(HERE / "first_call.py"))):
            cache = str(folder / f"cache{len(found)}")
            for state in ("empty", "filled"):
                # Python keeps its bytecode, as that of an installed package is kept.
                lines = lines_of(*command, FULMEN_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="")
                found += records_of(run, lines, 512, f", {state} cache, two cores")
    finally:
        os.sched_setaffinity(0, cores)
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


def show(records: list[Any]) -> None:
    for r in records:
        print(f"{r['case']:75} {r['who']:8} {r['implementation']:30} {r['op']:8} {r['dtype']:9}"
              f" {r['p50_ms'] * 1e3:10.2f} us, least {r['min_ms'] * 1e3:10.2f}",
              flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    parser.add_argument("--jax", action="store_true", help="also JAX arrays")
    asked = parser.parse_args()
    run = Run("cuda")
    nvrtc = fulmen.gpu_info()["nvrtc"]
    if nvrtc is not None:
        os.environ.setdefault("FULMEN_NVRTC", nvrtc["path"])  # programs in C look in fewer places
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = built(folder)
        parts = [
            lambda: records_of(run, lines_of(program, "calls"), 128),
            lambda: first_calls(run, program, folder),
            lambda: through_torch(run),
        ]
        if asked.jax:
            parts.append(lambda: through_jax(run))
        records: list[Any] = []
        for part in parts:
            made = part()
            show(made)
            records += made
            if asked.output is not None:
                path = write_lines(asked.output, "host", records)
    if asked.output is not None:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
