# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What segments cost on one GPU, beside the same call without.

python bench/context_parts.py [--rows 8192] [--chunks 8] [--seconds 45] [-o bench/results]

bfloat16, causal, 64 heads on 8, head dim 128, chunks of so many rows: one chunk, all chunks, two
chunks on all, as a zigzag's first rank has them, and a step of its ring. max_error: the largest
difference of o over the largest number. `--device cpu` tries it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

try:
    import torch
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.lab.benchmark.records import Run, write_lines

DIM = 128


class Bench:
    """Arrays, times and records."""

    def __init__(self, asked):
        self.asked, self.device, self.rows = asked, asked.device, asked.rows
        self.heads = (64, 8) if self.device == "cuda" else (4, 2)
        self.end, self.run, self.records = time.time() + asked.seconds, Run(asked.device), []
        self.generator = torch.Generator(self.device).manual_seed(1)

    def make(self, heads, chunks):
        shape = (1, heads, chunks * self.rows, DIM)
        return torch.randn(
            shape, device=self.device, dtype=torch.bfloat16, generator=self.generator
        )

    def segments(self, chunks):
        words = [[n * self.rows, self.rows, c * self.rows] for n, c in enumerate(chunks)]
        return torch.tensor(words, dtype=torch.int32, device=self.device)

    def mark(self):
        if self.device != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self, calls, rounds=15):
        """Median ms of calls by name, one after the other in each round."""
        found = {name: [] for name in calls}
        for round_ in range(rounds + 1):
            if round_ > 3 and time.time() > self.end:
                break
            for name, call in calls.items():  # one behind the other: the card never idles
                marks = (self.mark(), call(), self.mark())
                if round_ > 0:
                    found[name].append((marks[0], marks[2]))
        if self.device == "cuda":
            torch.cuda.synchronize()
        of = (
            (lambda a, b: a.elapsed_time(b))
            if self.device == "cuda"
            else lambda a, b: 1e3 * (b - a)
        )
        return {name: median(of(a, b) for a, b in marks) for name, marks in found.items()}

    def say(self, op, case, times, pairs, off=None):
        products = 4 if op == "forward" else 10
        for implementation, ms in times.items():
            flops = products * self.heads[0] * pairs * DIM
            self.records.append({
                "grid": "context", "op": op, "who": "fulmen", "case": case,
                "implementation": implementation, "dtype": "bfloat16", "heads_q": self.heads[0],
                "heads_kv": self.heads[1], "chunk": self.rows, "d_qk": DIM, "d_v": DIM,
                "p50_ms": ms, "tflops": flops / ms / 1e9, "max_error": off,
                "card": self.run.card, "versions": self.run.versions,
                "commit": self.run.commit, "date": self.run.date,
            })  # fmt: skip
            print(
                f"{op} {case} {implementation}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s, {off}"
            )


def off_of(x, y):
    return float((x.float() - y.float()).abs().max() / y.float().abs().max())


def by_segments(bench, case, rows, keys, plain=False):
    """Chunks of rows on chunks of keys, and the same call without segments where there is one."""
    n = bench.rows
    q, do = bench.make(bench.heads[0], len(rows)), bench.make(bench.heads[0], len(rows))
    k, v = bench.make(bench.heads[1], len(keys)), bench.make(bench.heads[1], len(keys))
    segments = {
        "causal": True, "q_segments": bench.segments(rows), "kv_segments": bench.segments(keys),
    }  # fmt: skip
    ways = {"segments": segments, **({"plain": {"causal": True}} if plain else {})}
    made = {w: fulmen.attention_forward(q, k, v, **options) for w, options in ways.items()}
    off = off_of(made["segments"].o, made["plain"].o) if plain else None
    pairs = sum(n * n if c > d else n * (n + 1) // 2 if c == d else 0 for c in rows for d in keys)
    forward = {
        w: lambda options=options: fulmen.attention_forward(q, k, v, **options)
        for w, options in ways.items()
    }
    backward = {
        w: lambda x=made[w], options=options: fulmen.attention_backward(
            do, q, k, v, x.o, x.stats, **options
        )
        for w, options in ways.items()
    }
    rounds = 15 if len(keys) == 1 else 3
    bench.say("forward", case, bench.times(forward, rounds), pairs, off)
    bench.say("backward", case, bench.times(backward, rounds), pairs)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="of a chunk")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=45.0, help="nothing begins after them")
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    asked = parser.parse_args(arguments)
    asked.rows = asked.rows or (8192 if asked.device == "cuda" else 128)
    bench, every = Bench(asked), list(range(asked.chunks))
    last, half = asked.chunks - 1, asked.chunks // 2
    cells = [
        lambda: by_segments(bench, "one chunk", [0], [0], True),
        lambda: by_segments(bench, "zigzag", [0, last], every),
        lambda: by_segments(
            bench, "step of a zigzag's ring", [half - 1, half], [half - 2, half + 1]
        ),
        lambda: by_segments(bench, "all chunks", every, every, True),
    ]
    for cell in cells:
        if time.time() < bench.end:
            cell()
        if asked.output is not None:
            path = write_lines(asked.output, "context-parts", bench.records)
    if asked.output is not None:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
