# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Times the CPU backend beside torch's CPU scaled_dot_product_attention, in one process.

Both sides take turns in random order on the same arrays, so that a machine that changes its speed
changes it for both; the figure to trust is the ratio of medians. One JSON object a line goes to
--output, torch's rows beside ours. Needs fulmen and torch; forward is compared with
F.scaled_dot_product_attention without gradients, backward with the operator that autograd calls.

    python bench/cpu_against_torch.py --output bench/results/DATE-cpu-CPU.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

import fulmen

Call = Callable[[], object]


def cpu_model() -> str:
    """The processor's name, as the operating system gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def sides(
    heads: int, rows: int, dim: int, causal: bool, dtype: torch.dtype
) -> dict[str, dict[str, Call]]:
    """{operation: {who: call}} on one set of random inputs (1, heads, rows, dim)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, heads, rows, dim, generator=generator).to(dtype) for _ in range(4)
    )
    ours = fulmen.attention_forward(q, k, v, causal=causal)
    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = forward_op(q, k, v, 0.0, causal)
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out = torch.empty_like(q)

    def torch_forward() -> torch.Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {
        "forward": {
            "fulmen": lambda: fulmen.attention(q, k, v, causal=causal, out=out),
            "torch": torch_forward,
        },
        "backward": {
            "fulmen": lambda: fulmen.attention_backward(
                do, q, k, v, ours.o, ours.stats, causal=causal
            ),
            "torch": lambda: backward_op(do, q, k, v, o, lse, 0.0, causal),
        },
    }


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, repeats times, sides in random order."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for who in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[who]()
            times[who].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Runs the grid, prints a line a cell, appends the rows to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    info = fulmen.build_info()
    grid = itertools.product(args.dtypes, args.dims, args.rows, (False, True))
    lines = []
    for dtype, dim, rows, causal in grid:
        for operation, calls in sides(args.heads, rows, dim, causal, getattr(torch, dtype)).items():
            times = interleaved(calls, args.repeats)
            median = {who: statistics.median(t) for who, t in times.items()}
            flops = 4 * args.heads * rows * rows * dim * (0.5 if causal else 1)
            flops *= 2.5 if operation == "backward" else 1
            for who, seconds in times.items():
                lines.append(
                    {
                        "grid": "cpu", "op": operation, "who": who,
                        "implementation": "tiled" if who == "fulmen" else "sdpa",
                        "dtype": dtype, "batch": 1, "heads_q": args.heads, "heads_kv": args.heads,
                        "seqlen_q": rows, "seqlen_kv": rows, "d_qk": dim, "d_v": dim,
                        "causal": causal, "case": "normal", "p50_ms": median[who] * 1e3,
                        "p99_ms": float(np.quantile(seconds, 0.99)) * 1e3,
                        "tflops": flops / median[who] / 1e12, "gbps": None, "peak_mib": None,
                        "max_error": None, "card": cpu_model(), "clock_mhz": None,
                        "versions": {"fulmen": fulmen.__version__, "torch": torch.__version__,
                                     "isa": info["isa"], "threads": args.threads},
                        "commit": commit, "date": datetime.date.today().isoformat(),
                    }
                )  # fmt: skip
            print(
                f"{operation:8} {dtype:8} D {dim:3} S {rows:5} {'causal' if causal else 'full':6}  "
                f"fulmen {flops / median['fulmen'] / 1e9:6.1f}  torch "
                f"{flops / median['torch'] / 1e9:6.1f} GFLOP/s  "
                f"ratio {median['torch'] / median['fulmen']:.2f}"
            )
    if args.output:
        with args.output.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
