# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a call costs beside its arithmetic: fulmen and torch's own attention in one run.

python bench/torch_overhead.py [--device cpu] [--rounds 300] [--calls 20] [-o bench/results]

(1, 1, 4, 8) float32 on the CPU, (1, 8, 128, 64) bfloat16 on a GPU. The sides alternate in random
order, a few calls at a time; each line has the least time of a call over the rounds, in
microseconds of the host's clock: rounds so short that another program's turn falls into few of
them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

try:
    import torch
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen._torch import guards
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run, write_lines
from fulmen.lab.benchmark.timing import Times

THEIRS = torch.nn.functional.scaled_dot_product_attention


def by_operator(q, k, v):
    """fulmen.attention as it runs where something watches."""
    shortcuts = guards.allows_fast_path, guards.needs_operators
    guards.allows_fast_path, guards.needs_operators = lambda *_: False, lambda: True
    try:
        return fulmen.attention(q, k, v)
    finally:
        guards.allows_fast_path, guards.needs_operators = shortcuts


SIDES = {"torch": THEIRS, "fulmen": fulmen.attention, "operator": by_operator}
IMPLEMENTATIONS = {
    "torch": "scaled_dot_product_attention",
    "fulmen": "fulmen.attention",
    "operator": "fulmen::attention, as under a mode",
}


def steps(attend, leaves, do):
    """The three measured steps."""
    plain = [x.detach() for x in leaves]

    def no_grad():
        with torch.no_grad():
            attend(*plain)

    def forward():
        attend(*leaves)

    def both():
        for x in leaves:
            x.grad = None
        attend(*leaves).backward(do)

    return {"no_grad": no_grad, "forward with grad": forward, "forward and backward": both}


def least_times(sides, rounds, calls, wait):
    """Seconds of a call of each side, the least over the rounds, sides in random order."""
    least = dict.fromkeys(sides, float("inf"))
    for call in sides.values():
        for _ in range(50):
            call()
    for _ in range(rounds):
        for name in random.sample(list(sides), len(sides)):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            least[name] = min(least[name], (time.perf_counter() - start) / calls)
    return least


def record(run, cell, step, who, seconds, case):
    """A line of bench/results, without rates: they would say nothing of the host."""
    made = run.record(cell, who, IMPLEMENTATIONS[who], Times([seconds], [seconds]), case)
    return {**made, "op": step, "p99_ms": None, "tflops": None, "gbps": None}


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if asked.device == "cpu":
        cell = Cell("torch_overhead", "forward", "float32", 1, 1, 1, 4, 8, False)
        run, wait = Run("cpu"), lambda: None
    else:
        cell = Cell("torch_overhead", "forward", "bfloat16", 1, 8, 8, 128, 64, False)
        run, wait = Run("cuda"), torch.cuda.synchronize
    shape, dtype = (cell.batch, cell.heads, cell.rows, cell.dim), getattr(torch, cell.dtype)
    leaves = [torch.randn(shape, device=asked.device, dtype=dtype).requires_grad_()
              for _ in range(3)]  # fmt: skip
    do = torch.ones_like(leaves[0])
    every = {name: steps(attend, leaves, do) for name, attend in SIDES.items()}
    case = f"wall of the host, least of {asked.rounds} rounds of {asked.calls} calls"
    records = []
    for step in every["torch"]:
        sides = {name: calls[step] for name, calls in every.items()}
        least = least_times(sides, asked.rounds, asked.calls, wait)
        records += [record(run, cell, step, who, each, case) for who, each in least.items()]
        print(f"{step:22}", *(f"{who} {each * 1e6:7.1f} us " for who, each in least.items()),
              f"difference {(least['fulmen'] - least['torch']) * 1e6:+.1f} us")  # fmt: skip
    if asked.output is not None:
        print(write_lines(asked.output, "torch-overhead", records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
