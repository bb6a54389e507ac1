# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains the model of train.py on a sequence that one GPU cannot hold, shared by several.

python examples/train_lm/long.py [--ranks 2] [--layers 32] [--heads 16] [--steps 4] [-o lines.jsonl]

First one GPU alone takes a step at two lengths: its memory grows with the rows, and that line says
how many rows it holds. Then all GPUs train on 0.9 times as many each: context parallelism shares
the rows of the one sequence, FSDP2 the weights. --rows takes a length instead. Without a GPU, two
processes share a short sequence; the losses must be those of one, and else the script ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional
except ImportError:
    print("this example needs PyTorch with FSDP2: pip install torch")
    sys.exit(0)

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import Decoder, by_fulmen, numbered

from fulmen.distributed import context_parallel

MOST = 0.95  # of a GPU's memory: the rest is what the driver and NCCL have
SHARE = 0.9  # of what all GPUs hold together


def say(asked, **fields):
    card = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    line = {**fields, "layers": asked.layers, "heads": asked.heads, "card": card,
            "torch": torch.__version__}  # fmt: skip
    print(json.dumps(line), flush=True)
    if asked.output:
        with open(asked.output, "a") as file:
            file.write(json.dumps(line) + "\n")


def losses(asked, rows, steps, cp=None):
    """The loss of each step on `rows` characters, the seconds of each, and the peak of memory."""
    text = numbered()
    torch.manual_seed(1)
    attend = by_fulmen if cp is None else lambda q, k, v: cp.attention(q, k, v, causal=True)
    with torch.device(asked.device):
        model = Decoder(int(text.max()) + 1, asked.layers, asked.heads, attend)
    if cp is not None:
        cp.length = rows
        mesh = init_device_mesh(asked.device, (cp.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.rate, betas=(0.9, 0.95))
    order = torch.Generator().manual_seed(2)
    positions = torch.arange(rows, device=asked.device)
    if cp is not None:
        positions = cp.positions(asked.device)
    found, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        start = int(torch.randint(0, len(text) - rows, (1,), generator=order))
        window = text[None, start : start + rows + 1].to(asked.device)
        given, wanted = window[:, :-1], window[:, 1:]
        if cp is not None:
            given, wanted = cp.shard(given), cp.shard(wanted)
        with torch.autocast(asked.device, torch.bfloat16, enabled=asked.device == "cuda"):
            logits = model(given, positions)
        total = functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(),
                                         reduction="sum")  # fmt: skip
        # The mean over the rows of all ranks; FSDP2 averages gradients over them.
        (total * (1 if cp is None else cp.size) / rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total.detach()
        if cp is not None:
            dist.all_reduce(total)
        found.append(float(total) / rows)  # waits for the GPU
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_reserved() if asked.device == "cuda" else 0
    return found, times, peak


def alone(_, asked, file):
    """What one GPU holds, by its memory at two lengths; written into `file`."""
    most = torch.cuda.get_device_properties(0).total_memory * MOST
    peaks = {}
    for rows in (8192, 16384):
        torch.cuda.reset_peak_memory_stats()
        peaks[rows] = losses(asked, rows, 2)[2]  # the second has the optimizer's state
        gc.collect()
        torch.cuda.empty_cache()
    slope = (peaks[16384] - peaks[8192]) / 8192
    held = int((most - peaks[8192]) / slope + 8192) // 128 * 128
    torch.cuda.reset_peak_memory_stats()
    found, times, peak = losses(asked, held, 2)
    say(asked, ranks=1, rows=held, bytes_a_row=round(slope), peak_gib=round(peak / 2**30, 1),
        seconds=[round(x, 3) for x in times], loss=found)  # fmt: skip
    Path(file).write_text(str(held))


def together(rank, asked, rows, folder):
    on_gpu = asked.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", f"file://{folder}/ranks", rank=rank,
                            world_size=asked.ranks)  # fmt: skip
    found, times, peak = losses(asked, rows, asked.steps, context_parallel())
    if rank == 0:
        say(asked, ranks=asked.ranks, rows=rows, peak_gib=round(peak / 2**30, 1),
            seconds=[round(x, 3) for x in times], loss=found)  # fmt: skip
    dist.destroy_process_group()
    wrong = not all(map(math.isfinite, found))
    if not on_gpu:
        expected, _, _ = losses(asked, rows, asked.steps)
        wrong |= max(abs(x - y) for x, y in zip(found, expected)) > 1e-3
    if wrong:
        raise SystemExit(1)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--rows", type=int, help="of the sequence; none: 0.9 of what fits")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("-o", "--output")
    asked = parser.parse_args(arguments)
    asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = asked.rows
    if asked.device == "cpu":
        asked.layers, asked.heads, rows = 1, 2, rows or 192
    with tempfile.TemporaryDirectory() as folder:
        if rows is None:
            held = f"{folder}/held"
            mp.start_processes(alone, (asked, held), nprocs=1, start_method="spawn")
            rows = int(SHARE * asked.ranks * int(Path(held).read_text())) // 128 * 128
        mp.start_processes(together, (asked, rows, folder), nprocs=asked.ranks,
                           start_method="spawn")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
