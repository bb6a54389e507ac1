# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A training step of GPT-2 small on a GPU: fulmen beside torch's attention by cuDNN and FA2.

python bench/gpt2_step.py [--rows 1024 4096 16384] [--modes eager compiled] [-o results.jsonl]

12 layers, 12 heads of dimension 64, bfloat16, AdamW, 16,384 tokens a step; forward, backward and
update. All sides train the same model, whose attention is exchanged: they are visited in random
order, round after round, with a pause before each visit; a record holds the median of a step in
milliseconds, its 99th percentile and the peak of allocated memory. --tiny runs a small model
anywhere, to see that the program works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run
from fulmen.lab.benchmark.timing import Times

TOKENS = 16_384


class Sizes:
    """GPT-2 small; its vocabulary rounded up to a multiple of 64."""

    vocabulary, dim, heads, layers = 50_304, 768, 12, 12


class Tiny(Sizes):
    vocabulary, dim, heads, layers = 96, 64, 2, 2


def by_fulmen(q, k, v):
    return fulmen.attention(q, k, v, causal=True, layout="bshd")


def by_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


SIDES = {
    "fulmen": (by_fulmen, contextlib.nullcontext),
    "cudnn": (by_torch, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "fa2": (by_torch, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
}


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.heads = sizes.heads
        self.attend = by_fulmen
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.dim) for _ in range(2))
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim)
        self.out = nn.Linear(sizes.dim, sizes.dim)
        self.up = nn.Linear(sizes.dim, 4 * sizes.dim)
        self.down = nn.Linear(4 * sizes.dim, sizes.dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, sizes, rows):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.places = nn.Embedding(rows, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.dim)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, digits, targets):
        x = self.tokens(digits) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trainer(side, sizes, rows, batch, device, is_compiled):
    """A function that makes one step and returns the loss; the model is made anew."""
    attend, context = SIDES[side]
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(sizes, rows).to(torch.bfloat16)
    for block in model.blocks:
        block.attend = attend
        if is_compiled:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    digits = torch.randint(0, sizes.vocabulary, (batch, rows + 1), device=device)

    def step():
        with context():
            loss = model(digits[:, :-1], digits[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def milliseconds(step, calls, device):
    """The wall time of each of `calls` steps."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def prepared(sizes, rows, batch, device, is_compiled, asked):
    """(side -> step, side -> MiB, side -> first losses), compiled and warm."""
    steps, memory, losses = {}, {}, {}
    for side in asked.sides if device == "cuda" else ["fulmen"]:
        try:
            steps[side] = step = trainer(side, sizes, rows, batch, device, is_compiled)
            losses[side] = [float(step()) for _ in range(3)]
            if device == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                memory[side] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except RuntimeError as error:
            print(f"{side} at {rows} rows: {str(error).splitlines()[0]}")
            steps.pop(side, None)
    return steps, memory, losses


def timed(steps, memory, losses, device, asked):
    """Side -> (times of steps, MiB, first losses); the sides of one shape beside each other."""
    times = {side: [] for side in steps}
    for _ in range(asked.rounds):
        for side in random.sample(list(steps), len(steps)):
            time.sleep(0.025)
            milliseconds(steps[side], 1, device)
            times[side] += milliseconds(steps[side], asked.calls, device)
    return {side: (times[side], memory.get(side), losses[side]) for side in steps}


def record(run, side, sizes, rows, batch, mode, found):
    """A line of bench/results; clocks and rates of a kernel say nothing of a step."""
    times, memory, _ = found
    cell = Cell("gpt2", "training step", "bfloat16", batch, sizes.heads, sizes.heads, rows,
                sizes.dim // sizes.heads, True)  # fmt: skip
    who = "fulmen" if side == "fulmen" else f"{side} through torch sdpa"
    seconds = [each / 1e3 for each in times]
    line = run.record(cell, side, who, Times([statistics.median(seconds)], seconds), mode)
    return {**line, "tflops": None, "gbps": None, "peak_mib": memory and round(memory, 1)}


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5, help="0: compile, measure nothing")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--output")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.tiny:
        print("no NVIDIA GPU; --tiny runs a small model on the CPU")
        return 0
    sizes, tokens = (Tiny, 256) if asked.tiny else (Sizes, TOKENS)
    if asked.tiny:
        asked.rows = [64]
    run = Run(device)
    for rows in asked.rows:
        batch = max(1, tokens // rows)
        for mode in asked.modes:
            ready = prepared(sizes, rows, batch, device, mode == "compiled", asked)
            found = timed(*ready, device, asked)
            for side, values in found.items() if asked.rounds else ():
                line = record(run, side, sizes, rows, batch, mode, values)
                losses = " ".join(f"{loss:.3f}" for loss in values[2])
                print(f"{rows:6} {mode:8} {side:7} {line['p50_ms']:8.2f} ms "
                      f"{line['peak_mib'] or 0:8.0f} MiB  losses {losses}", flush=True)  # fmt: skip
                if asked.output:
                    with open(asked.output, "a") as file:
                        file.write(json.dumps(line) + "\n")
            del ready, found
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
