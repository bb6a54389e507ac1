# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on the GPUs of one host, over NCCL: every result against one GPU, then rates.

python bench/context_parallel.py [--ranks 2] [--rows 8192 32768] [--seconds 50] [-o bench/results]

Rates: bfloat16, 64 heads on 8, head dim 128, so many rows a rank; of one GPU on as many pairs, and
of each layout and schedule, the slowest rank's median. Causal, and packed documents of 256 rows to
half of the sequence. Checks: schedules, layouts and masks, o and gradients, the largest difference
from one GPU over the largest number. `--peers` adds those of context_peers.py under causal.
`--device cpu` tries the script on small shapes, over Gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import socket
import sys
import time
from itertools import accumulate
from pathlib import Path
from statistics import median

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.distributed import balanced, context_parallel
from fulmen.distributed.transports import Group
from fulmen.lab.benchmark.records import Run, write_lines

HEADS, KV_HEADS, DIM = 64, 8, 128
WAYS = {
    "causal": [("zigzag", "gather"), ("zigzag", "ring"), ("zigzag", "heads")],
    "documents": [("zigzag", "gather"), ("balanced 512", "gather"), ("balanced 2048", "gather")],
}


class Bench:
    """What the ranks of one run share."""

    def __init__(self, asked, rank):
        self.asked, self.rank, self.end = asked, rank, time.time() + asked.seconds
        self.device = torch.device(asked.device, rank) if asked.device == "cuda" else "cpu"
        self.run, self.records = Run(asked.device), []
        self.generator = torch.Generator(self.device).manual_seed(1)

    def randn(self, *shape):
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16,
                           generator=self.generator)  # fmt: skip

    def is_over(self, left=0.0):
        """Whether the time is over, for all ranks alike."""
        late = torch.tensor([int(time.time() > self.end - left)], device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late)

    def wait(self):
        if self.asked.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, call, seconds=0.8):
        """Seconds of a call: the median of the slowest rank, some calls one behind the other."""
        for _ in range(2):
            call()
        self.wait()
        dist.barrier()
        begin = time.time()
        call()
        self.wait()
        count = torch.tensor([max(3, min(40, int(seconds / (time.time() - begin))))],
                             device=self.device)  # fmt: skip
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        found = []
        for _ in range(int(count)):
            if self.asked.device == "cuda":
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[0].record()
                call()
                marks[1].record()
                found.append(marks)
            else:
                begin = time.time()
                call()
                found.append(time.time() - begin)
        self.wait()
        if self.asked.device == "cuda":
            found = [1e-3 * one.elapsed_time(other) for one, other in found]
        slowest = torch.tensor([median(found)], device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def say(self, **fields):
        if self.rank == 0:
            size = dist.get_world_size()
            self.records.append({
                "grid": "context", "ranks": size, **fields, "card": self.run.card,
                "versions": self.run.versions, "commit": self.run.commit, "date": self.run.date,
            })  # fmt: skip
            shown = {name: round(x, 6) if isinstance(x, float) else x for name, x in fields.items()}
            print(shown, flush=True)


def documents_of(length):
    """Lengths of packed documents, from 256 rows to half of the sequence, as many of each scale."""
    draw, found = random.Random(5), []
    while sum(found) < length:
        size = int(2 ** draw.uniform(min(8, math.log2(length) - 1), math.log2(length) - 1))
        found.append(min(size, length - sum(found)))
    return found


class Sequence:
    """One sequence and what hides pairs of it."""

    def __init__(self, name, length, device):
        lengths = [length] if name == "causal" else documents_of(length)
        self.name, self.length = name, length
        self.pairs = sum(n * (n + 1) // 2 for n in lengths)
        self.options = {"causal": True}
        if name == "documents":
            ends = torch.tensor(list(accumulate(lengths)))
            self.ids = torch.searchsorted(ends, torch.arange(length), right=True).int()
            self.options["mask"] = fulmen.masks.documents(self.ids.to(device))

    def layout(self, name, ranks):
        """A layout by its name; "balanced 512": chunks of 512 rows."""
        if not name.startswith("balanced"):
            return name
        mask = fulmen.masks.documents(self.ids.numpy())
        chunk = min(int(name.split()[1]), self.length // ranks // 128 * 128)
        return balanced(self.length, ranks, chunk=max(128, chunk), causal=True, mask=mask)


class Rates:
    """The cells of some number of rows a rank."""

    def __init__(self, bench, rows, heads):
        self.bench, self.rows, self.heads, self.kv_heads = bench, rows, heads, max(1, heads // 8)
        self.size = dist.get_world_size()

    def say(self, who, way, times, pairs, option, kv_heads=None):
        """Records of seconds by operation."""
        for op, seconds in times.items():
            flops = 4 * DIM * self.heads * pairs * (1.0 if op == "forward" else 2.5)
            self.bench.say(op=op, who=who, implementation=way, dtype="bfloat16",
                           heads_q=self.heads, heads_kv=kv_heads or self.kv_heads, d_qk=DIM,
                           causal=True, seqlen_q=self.rows, option=option, p50_ms=1e3 * seconds,
                           tflops=flops / seconds / 1e12)  # fmt: skip

    def arrays(self, rows, kv_heads=None):
        """q, k, v and the gradient of o, heads first."""
        kv_heads = kv_heads or self.kv_heads
        return [self.bench.randn(1, n, rows, DIM)
                for n in (self.heads, kv_heads, kv_heads, self.heads)]  # fmt: skip

    def both(self, attend, arrays):
        """Seconds of a call and of its gradients."""
        leaves = [x.requires_grad_() for x in arrays[:3]]
        with torch.no_grad():
            forward = self.bench.timed(lambda: attend(*leaves))
        o = attend(*leaves)
        backward = self.bench.timed(
            lambda: torch.autograd.grad(o, leaves, arrays[3], retain_graph=True)
        )
        return {"forward": forward, "backward": backward}

    def one_device(self, name):
        """About as many pairs as a rank has, on one device."""
        length = self.rows * self.size
        rows = self.rows
        if name == "causal":
            rows = math.isqrt(length * length // self.size) // 128 * 128
        one = Sequence(name, rows, self.bench.device)
        q, k, v, do = self.arrays(rows)
        result = fulmen.attention_forward(q, k, v, **one.options)
        kept = do, q, k, v, result.o, result.stats
        times = {
            "forward": self.bench.timed(lambda: fulmen.attention_forward(q, k, v, **one.options)),
            "backward": self.bench.timed(lambda: fulmen.attention_backward(*kept, **one.options)),
        }
        self.say("one device", f"{rows} rows alone", times, one.pairs, name)

    def ranks(self, name, layout, schedule):
        """A layout and a schedule."""
        whole = Sequence(name, self.rows * self.size, self.bench.device)
        cp = context_parallel(length=whole.length, layout=whole.layout(layout, self.size),
                              schedule=schedule)  # fmt: skip
        times = self.both(lambda *x: cp.attention(*x, **whole.options),
                          self.arrays(cp.shards.rows(cp.rank)))  # fmt: skip
        self.say("fulmen", f"{layout} {schedule}", times, whole.pairs / self.size, name)

    def peer(self, name):
        """A side of context_peers.py."""
        from context_peers import PEERS

        make, has_groups = PEERS[name]
        kv_heads = self.kv_heads if has_groups else self.heads
        length = self.rows * self.size
        with make(self.bench.asked.device) as attend:
            arrays = [x.transpose(1, 2).contiguous() for x in self.arrays(self.rows, kv_heads)]
            times = self.both(attend, arrays)
        pairs = length * (length + 1) // 2 / self.size
        self.say(name, "zigzag", times, pairs, "causal", kv_heads)

    def every(self):
        asked = self.bench.asked
        cells = []
        for name in asked.masks:
            cells.append((self.one_device, name))
            cells += [(self.ranks, name, *way) for way in WAYS[name][: asked.ways]]
        if "causal" in asked.masks:
            cells += [(self.peer, name) for name in asked.peers]
        for call, *what in cells:
            if self.bench.is_over():
                self.bench.say(cut=f"{self.rows} {' '.join(what)}")
            else:
                call(*what)


def links(bench):
    """What travels: bytes gathered from all ranks, and passed on in a ring."""
    transport = Group()
    for mib in (32, 128) if bench.asked.device == "cuda" else (1,):
        x = torch.zeros(mib << 20, dtype=torch.uint8, device=bench.device)
        ways = {"gather": transport.gather, "shift": lambda x: transport.shift([x], 1)}
        for name, start in ways.items():
            seconds = bench.timed(lambda start=start, x=x: start(x).wait(), 0.2)
            received = (dist.get_world_size() - 1 if name == "gather" else 1) * (mib << 20)
            bench.say(op="link", implementation=name, mib=mib, p50_ms=1e3 * seconds,
                      gbps=received / seconds / 1e9)  # fmt: skip


def cases(bench, length, heads):
    """What is asked of calls, by name."""
    ids = torch.tensor([int(math.sqrt(row)) // 9 for row in range(length)],
                       dtype=torch.int32, device=bench.device)  # fmt: skip
    each = torch.rand(heads, device=bench.device, generator=bench.generator)
    documents = fulmen.masks.documents(ids)
    return {
        "causal": {"causal": True},
        "window": {"causal": True, "window": length // 6},
        "full": {},
        "prefix": {"causal": True, "mask": fulmen.masks.prefix(length // 5)},
        "documents": {"causal": True, "mask": documents},
        "sinks": {"causal": True, "sinks": each},
        "alibi": {"causal": True, "alibi_slopes": each},
        "texts": {
            "score": fulmen.score("s - each[h] * abs(p - j)", each=each), "mask": "j <= i",
        },
    }  # fmt: skip


def checks(bench, length, heads):
    """o and the gradients of each mask, schedule and layout against one device."""
    q, do = bench.randn(1, heads, length, DIM), bench.randn(1, heads, length, DIM)
    k, v = bench.randn(1, heads // 4, length, DIM), bench.randn(1, heads // 4, length, DIM)
    for name, options in cases(bench, length, heads).items():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = fulmen.attention(*leaves, **options)
        expected = [o, *torch.autograd.grad(o, leaves, do)]
        for layout in ("zigzag", "contiguous"):
            for schedule in ("gather", "ring", "heads"):
                if bench.is_over():
                    bench.say(cut=f"{name} {layout} {schedule}")
                    continue
                cp = context_parallel(length=length, layout=layout, schedule=schedule)
                mine = [cp.shard(x, 2).detach().requires_grad_() for x in (q, k, v)]
                part = cp.attention(*mine, **options)
                found = [part, *torch.autograd.grad(part, mine, cp.shard(do, 2))]
                found = [cp.unshard(x.detach(), 2) for x in found]
                errors = [
                    float((x.float() - y.float()).abs().max() / y.float().abs().max())
                    for x, y in zip(found, expected)
                ]
                bench.say(op="check", who="fulmen", implementation=f"{layout} {schedule}",
                          option=name, seqlen_q=length // dist.get_world_size(),
                          max_error=max(errors), errors=errors,
                          same_bits=bool(torch.equal(found[0], o)))  # fmt: skip


def work(rank, asked, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpu = asked.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=asked.ranks)
    bench = Bench(asked, rank)
    links(bench)
    for rows in asked.rows:
        Rates(bench, rows, HEADS if on_gpu else 8).every()
    if asked.checks:
        checks(bench, 4032 if on_gpu else 252, 16 if on_gpu else 8)
    if rank == 0 and asked.output is not None:
        print(write_lines(asked.output, "context", bench.records))
    dist.destroy_process_group()


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", help="of each rank")
    parser.add_argument("--masks", nargs="*", choices=WAYS, default=list(WAYS), help="of rates")
    parser.add_argument("--ways", type=int, help="the first so many layouts and schedules")
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", nargs="*", default=[], help="of context_peers.py, by name")
    parser.add_argument("--seconds", type=float, default=50.0, help="nothing begins after them")
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    asked = parser.parse_args(arguments)
    if asked.rows is None:
        asked.rows = [8192, 32768] if asked.device == "cuda" else [256]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    mp.start_processes(work, (asked, port), nprocs=asked.ranks, start_method="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
