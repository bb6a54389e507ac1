# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""All rungs beside each other: time, memory beyond the arguments, error against float64.

python examples/ladder/compare.py [--rows 2048] [--dtype float32] [--causal] [-o table.jsonl]

The rungs of this folder, then fulmen's own implementations from the plainest to the fastest, then
torch's attention. `fulmen ablation` goes on from there: each optimisation of a kernel off in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils.benchmark import Timer
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.lab.benchmark.cells import Cell
from fulmen.lab.benchmark.records import Run
from fulmen.lab.benchmark.timing import Times

sys.path.insert(0, str(Path(__file__).parent))
import chunked
import naive

IMPLEMENTATIONS = {"cpu": ("scalar", "tiled"), "cuda": ("naive", "simt", "sm80", "sm90")}


def by_fulmen(implementation, q, k, v, causal):
    return fulmen.attention(q, k, v, causal=causal, implementation=implementation)


def by_torch(q, k, v, causal):
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def rungs(device):
    """Name -> o of (q, k, v, causal)."""
    found = {"naive": naive.attention, "chunked": chunked.attention}
    if device == "cuda" and importlib.util.find_spec("triton"):
        import triton_forward

        found["triton"] = triton_forward.attention
    for name in IMPLEMENTATIONS[device]:
        found[f"fulmen {name}"] = partial(by_fulmen, name)
    return {**found, "torch": by_torch}


def measured(attend, arrays, causal, truth, seconds):
    """Seconds of a call, MiB beyond the arguments (None on the CPU), the largest error."""
    on_gpu = arrays[0].is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    o = attend(*arrays, causal)
    mib = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
    error = float((o.double() - truth).abs().max())
    timer = Timer("attend(*arrays, causal)",
                  globals={"attend": attend, "arrays": arrays, "causal": causal})  # fmt: skip
    return timer.blocked_autorange(min_run_time=seconds).median, mib, error


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048 if torch.cuda.is_available() else 512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing for each rung")
    parser.add_argument("-o", "--output")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shape = (3, 1, asked.heads, asked.rows, asked.dim)
    arrays = torch.randn(shape, device=device).to(getattr(torch, asked.dtype)).unbind()
    truth = naive.attention(*(x.double() for x in arrays), asked.causal)
    run = Run(device)
    cell = Cell("ladder", "forward", asked.dtype, 1, asked.heads, asked.heads, asked.rows,
                asked.dim, asked.causal)  # fmt: skip
    print(f"{run.card}, {asked.heads} heads, {asked.rows} rows, dim {asked.dim}, {asked.dtype}")
    for name, attend in rungs(device).items():
        try:
            found = measured(attend, arrays, asked.causal, truth, asked.seconds)
        except fulmen.UnsupportedError as error:
            print(f"{name:14} {error}")
            continue
        seconds, mib, error = found
        memory = "" if mib is None else f"{mib:9.1f} MiB"
        print(f"{name:14} {seconds * 1e3:10.3f} ms {memory}   error {error:.1e}")
        if asked.output:
            line = run.record(cell, name, name, Times([seconds], [seconds]), "one call")
            line |= {"peak_mib": mib, "max_error": error}
            with open(asked.output, "a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
