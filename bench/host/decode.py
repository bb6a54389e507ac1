# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the host is busy with one decode call through Python, by the form of the call.

python bench/host/decode.py [--device cpu] [--rounds 200] [--calls 20] [-o bench/results]

On a GPU one row of 32 heads over a cache of 8 heads and 4,096 keys, bfloat16; on the CPU so few
keys that little but the call remains, float32. Forms: contiguous, with lse, with a length, in
pages, each into memory of its own and into `out`; by a plan; NumPy on the CPU; torch's own
attention beside them. They take turns in random order, a few calls at a time; each line has the
least and the median time of a call over the rounds, in microseconds. Written as
DATE-host-decode-CARD.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

try:
    import torch
except ImportError:
    print("this benchmark needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run, write_lines
from fulmen.lab.benchmark.timing import Times

PAGE = 16


def forms(device):
    """Calls by name: (who, form)."""
    on_gpu = device == "cuda"
    heads, kv_heads, dim, keys = (32, 8, 128, 4096) if on_gpu else (4, 1, 8, PAGE)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = (1, heads, 1, dim), (1, kv_heads, keys, dim), (keys // PAGE, kv_heads, PAGE, dim)
    q, kv, pool = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    table = torch.arange(keys // PAGE, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([keys], dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    paged = {"page_table": table, "kv_lengths": lengths}
    plan = fulmen.plan(q, kv, kv, need=())
    plan_of_pages = fulmen.plan(q, pool, pool, need=(), **paged)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = {
        ("torch", "contiguous"): lambda: sdpa(q, kv, kv, enable_gqa=True),
        ("fulmen", "contiguous"): lambda: fulmen.attention(q, kv, kv),
        ("fulmen", "contiguous, lse"): lambda: fulmen.attention(q, kv, kv, return_lse=True),
        ("fulmen", "contiguous, out"): lambda: fulmen.attention(q, kv, kv, out=out),
        ("fulmen", "with a length"): lambda: fulmen.attention(q, kv, kv, kv_lengths=lengths),
        ("fulmen", "in pages"): lambda: fulmen.attention_paged(q, pool, pool, table, lengths),
        ("fulmen", "in pages, out"): lambda: fulmen.attention_paged(
            q, pool, pool, table, lengths, out=out
        ),
        ("fulmen", "plan"): lambda: plan.forward(q, kv, kv),
        ("fulmen", "plan, out"): lambda: plan.forward(q, kv, kv, out=out),
        ("fulmen", "plan in pages"): lambda: plan_of_pages.forward(q, pool, pool),
        ("fulmen", "plan in pages, all new"): lambda: plan_of_pages.forward(
            q, pool, pool, out=out, **paged
        ),
    }
    if not on_gpu:
        arrays = [x.numpy() for x in (q, kv, pool, table, lengths)]
        found.update(of_numpy(*arrays))
    return found


def of_numpy(q, kv, pool, table, lengths):
    plan = fulmen.plan(q, kv, kv, need=())
    return {
        ("fulmen", "NumPy, contiguous"): lambda: fulmen.attention(q, kv, kv),
        ("fulmen", "NumPy, in pages"): lambda: fulmen.attention_paged(
            q, pool, pool, table, lengths
        ),
        ("fulmen", "NumPy, plan"): lambda: plan.forward(q, kv, kv),
    }


def timed(sides, rounds, calls, wait):
    """Seconds of a call of each side in each round."""
    every = {name: [] for name in sides}
    for call in sides.values():
        for _ in range(50):
            call()
    for _ in range(rounds):
        for name in random.sample(list(sides), len(sides)):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            every[name].append((time.perf_counter() - start) / calls)
    return every


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, help="folder of the records")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    on_gpu = asked.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    cell = (
        Cell("host-decode", "forward", "bfloat16", 1, 32, 8, 1, 128, False)
        if on_gpu
        else Cell("host-decode", "forward", "float32", 1, 4, 1, 1, 8, False)
    )
    run, records = Run(asked.device), []
    with torch.no_grad():
        every = timed(forms(asked.device), asked.rounds, asked.calls, wait)
    for (who, form), seconds in every.items():
        times = Times([statistics.median(seconds)], seconds)
        made = run.record(cell, who, "", times, f"host time of a decode call, Python, {form}")
        records.append({**made, "tflops": None, "gbps": None, "min_ms": min(seconds) * 1e3})
        print(f"{who:7} {form:24} least {min(seconds) * 1e6:6.1f} us, median "
              f"{times.median * 1e6:6.1f}")  # fmt: skip
    if asked.output is not None:
        print(write_lines(asked.output, "host-decode", records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
