# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What parts of a sequence cost on one GPU: segments, and results merged in place, beside plain.

python bench/context_parts.py [--rows 8192] [--chunks 8] [--seconds 45] [-o bench/results]

bfloat16, causal, 64 heads on 8, head dim 128, chunks of so many rows. accumulate: one chunk of rows
on one of keys, causal and full, and a ring of all chunks of keys, each call merged in its kernel,
in a pass of PyTorch behind it, or one call on all keys; their gradients likewise. segments: the
call by segments beside the same without; two chunks on all, as a zigzag's first rank has them;
dropout beside both.
max_error: the largest difference of results over the largest number. `--device cpu` tries it.
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
from fulmen.distributed.steps import _merge
from fulmen.lab.benchmark.records import Run, write_lines

DIM = 128
DROPOUT = {"dropout_p": 0.1, "rng": (1, 2)}


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

    def segments(self, chunks, shift=0):
        words = [[n * self.rows, self.rows, c * self.rows + shift] for n, c in enumerate(chunks)]
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


def steps(bench):
    """One chunk of rows on one of keys, merged with the part of another."""
    n = bench.rows
    for causal in (True, False):
        q, k, v = (bench.make(heads, 1) for heads in (bench.heads[0], *bench.heads[1:] * 2))
        k2, v2 = bench.make(bench.heads[1], 1), bench.make(bench.heads[1], 1)
        whole = fulmen.attention(q, torch.cat([k2, k], 2), torch.cat([v2, v], 2), causal=causal)
        part = fulmen.attention_forward(q, k2, v2, out_dtype="float32")
        fulmen.attention_forward(q, k, v, causal=causal, accumulate=part)
        off = off_of(part.o, whole)

        def own(out_dtype=None, accumulate=None, causal=causal, qkv=(q, k, v)):
            return fulmen.attention_forward(
                *qkv, causal=causal, out_dtype=out_dtype, accumulate=accumulate
            )

        def merged(part=part, own=own):
            found = own("float32")
            _merge(part.o, part.stats, found.o, found.stats)

        calls = {
            "plain": own, "float32": lambda own=own: own("float32"),
            "accumulate": lambda own=own, part=part: own(accumulate=part), "merged": merged,
        }  # fmt: skip
        pairs = n * (n + 1) // 2 if causal else n * n
        bench.say("forward", "step causal" if causal else "step", bench.times(calls), pairs, off)


def ring(bench):
    """The last chunk of rows on all keys, a chunk at a time."""
    n, chunks = bench.rows, bench.asked.chunks
    q = bench.make(bench.heads[0], 1)
    k, v = bench.make(bench.heads[1], chunks), bench.make(bench.heads[1], chunks)
    at = [slice(c * n, c * n + n) for c in reversed(range(chunks))]

    def call(keys, **options):
        return fulmen.attention_forward(
            q, k[:, :, keys], v[:, :, keys], causal=keys is at[0], **options
        )

    def accumulated():
        part = call(at[0], out_dtype="float32")
        for keys in at[1:]:
            call(keys, accumulate=part)
        return part

    def merged():
        part = call(at[0], out_dtype="float32")
        for keys in at[1:]:
            found = call(keys, out_dtype="float32")
            _merge(part.o, part.stats, found.o, found.stats)

    def one():
        return fulmen.attention_forward(q, k, v, causal=True)

    off = off_of(accumulated().o, one().o)
    calls = {"plain": one, "accumulate": accumulated, "merged": merged}
    pairs = n * (n + 1) // 2 + (chunks - 1) * n * n
    bench.say("forward", f"ring of {chunks}", bench.times(calls, 9), pairs, off)


def gradients(bench):
    """Of the same steps, added to sums by the call or by PyTorch; and of the ring."""
    n, chunks = bench.rows, bench.asked.chunks
    q, do = bench.make(bench.heads[0], 1), bench.make(bench.heads[0], 1)
    k, v = bench.make(bench.heads[1], chunks), bench.make(bench.heads[1], chunks)
    at = [slice(c * n, c * n + n) for c in reversed(range(chunks))]
    sums = fulmen.Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)))

    def part_of(keys):
        return fulmen.Gradients(sums.dq, sums.dk[:, :, keys], sums.dv[:, :, keys])

    def call(forward, keys, causal, **more):
        return fulmen.attention_backward(
            do, q, k[:, :, keys], v[:, :, keys], forward.o, forward.stats, causal=causal, **more
        )

    def accumulated(forward, keys, causal):
        call(forward, keys, causal, accumulate=part_of(keys))

    def added(forward, keys, causal):
        for total, x in zip(part_of(keys), call(forward, keys, causal)):
            if x is not None:
                total.add_(x)

    for causal in (True, False):
        forward = fulmen.attention_forward(q, k[:, :, at[0]], v[:, :, at[0]], causal=causal)
        for x in sums[:3]:
            x.zero_()
        accumulated(forward, at[0], causal)
        off = off_of(sums.dq, call(forward, at[0], causal).dq)
        calls = {
            name: lambda way=way, forward=forward, causal=causal: way(forward, at[0], causal)
            for name, way in {"plain": call, "accumulate": accumulated, "added": added}.items()
        }
        pairs = n * (n + 1) // 2 if causal else n * n
        bench.say("backward", "step causal" if causal else "step", bench.times(calls), pairs, off)

    whole = fulmen.attention_forward(q, k, v, causal=True)

    def turns(way):
        for keys in at:
            way(whole, keys, keys is at[0])

    calls = {
        "plain": lambda: call(whole, slice(None), True), "steps": lambda: turns(call),
        "accumulate": lambda: turns(accumulated), "added": lambda: turns(added),
    }  # fmt: skip
    pairs = n * (n + 1) // 2 + (chunks - 1) * n * n
    bench.say("backward", f"ring of {chunks}", bench.times(calls, 5), pairs)


def by_segments(bench, case, rows, keys, plain=None, shift=0, **more):
    """Chunks of rows on chunks of keys, and the same call without segments where there is one."""
    n = bench.rows
    q, do = bench.make(bench.heads[0], len(rows)), bench.make(bench.heads[0], len(rows))
    k, v = bench.make(bench.heads[1], len(keys)), bench.make(bench.heads[1], len(keys))
    segments = {
        "causal": True, "q_segments": bench.segments(rows, shift),
        "kv_segments": bench.segments(keys, shift), **more,
    }  # fmt: skip
    ways = {"segments": segments, **({"plain": {"causal": True, **more}} if plain else {})}
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
    cells = [
        lambda: steps(bench),
        lambda: by_segments(bench, "one chunk", [0], [0], True),
        lambda: ring(bench),
        lambda: gradients(bench),
        lambda: by_segments(bench, "zigzag", [0, asked.chunks - 1], every),
        lambda: by_segments(bench, "all chunks", every, every, True),
        lambda: by_segments(bench, "one chunk, dropout", [0], [0], True, **DROPOUT),
        lambda: by_segments(bench, "one chunk, dropout, one further", [0], [0], shift=1, **DROPOUT),
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
