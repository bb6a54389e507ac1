# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a call costs beside its arithmetic: fulmen and torch's own attention in one run.

python bench/torch_overhead.py [--device cpu] [--rounds 300] [--calls 20]

(1, 1, 4, 8) float32 on the CPU, (1, 8, 128, 64) bfloat16 on a GPU. The sides alternate in random
order, a few calls at a time; each line has the least time of a call over the rounds, in
microseconds of the host's clock: rounds so short that another program's turn falls into few of
them. JSON goes to the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

try:
    import torch
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen._torch import guards

THEIRS = torch.nn.functional.scaled_dot_product_attention


def by_operator(q, k, v):
    """fulmen.attention as it runs where something watches."""
    shortcuts = guards.take_the_shortest_way, guards.is_watched
    guards.take_the_shortest_way, guards.is_watched = lambda *_: False, lambda: True
    try:
        return fulmen.attention(q, k, v)
    finally:
        guards.take_the_shortest_way, guards.is_watched = shortcuts


SIDES = {"torch": THEIRS, "fulmen": fulmen.attention, "operator": by_operator}


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


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20)
    asked = parser.parse_args(arguments)
    on_gpu = asked.device != "cpu"
    torch.set_num_threads(1)
    shape, dtype = ((1, 8, 128, 64), torch.bfloat16) if on_gpu else ((1, 1, 4, 8), torch.float32)
    leaves = [torch.randn(shape, device=asked.device, dtype=dtype).requires_grad_()
              for _ in range(3)]  # fmt: skip
    do = torch.ones_like(leaves[0])
    every = {name: steps(attend, leaves, do) for name, attend in SIDES.items()}
    found = {}
    for step in every["torch"]:
        least = dict.fromkeys(SIDES, float("inf"))
        for name in SIDES:
            for _ in range(50):
                every[name][step]()
        for _ in range(asked.rounds):
            for name in random.sample(list(SIDES), len(SIDES)):
                if on_gpu:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(asked.calls):
                    every[name][step]()
                least[name] = min(least[name], (time.perf_counter() - start) / asked.calls * 1e6)
        found[step] = {name: round(value, 2) for name, value in least.items()}
        more = found[step]["fulmen"] - found[step]["torch"]
        print(f"{step:22}", *(f"{n} {v:7.1f} us " for n, v in found[step].items()),
              f"difference {more:+.1f} us")  # fmt: skip
    print(json.dumps({"shape": shape, "dtype": str(dtype), "torch": torch.__version__,
                      "device": asked.device, "microseconds": found}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
