# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism in training: two processes share each sequence, and FSDP2 the weights.

A small causal model with rotary embeddings. Each process has half of the rows, in zigzag, and
attends with them to the keys of both; the gradients of the weights are summed over the processes,
as those of any parallelism over tokens. The losses are those of one process.

python examples/distributed/context_parallel.py    two processes on this machine (gloo) against one;
ends with 1 if their losses differ
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError:
    print("this example needs PyTorch with FSDP2: pip install torch")
    sys.exit(0)

import fulmen
from fulmen.distributed import context_parallel

PROCESSES, ROWS, WORDS, WIDTH, HEADS, STEPS = 2, 96, 61, 64, 4, 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, attend, positions):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        cos, sin = fulmen.rotary_tables(ROWS, WIDTH // HEADS)
        q, k = (fulmen.rotary(y, positions, torch.as_tensor(cos), torch.as_tensor(sin),
                              layout="bshd") for y in (q, k))  # fmt: skip
        x = x + self.out(attend(q, k, v, causal=True, layout="bshd").flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, attend, positions):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, attend, positions)
        return self.head(x)


def losses(cp=None) -> list[float]:
    """The loss of each step, of one process or of all that share each sequence."""
    model = Model()
    if cp is not None:
        mesh = init_device_mesh("cpu", (cp.size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(WORDS, (2, ROWS + 1)).cumsum(1) % WORDS
        # --8<-- [start:step]
        given, wanted, attend = ids[:, :-1], ids[:, 1:], fulmen.attention
        positions = torch.arange(ROWS)
        if cp is not None:
            given, wanted, attend = cp.shard(given), cp.shard(wanted), cp.attention
            positions = cp.positions()
        logits = model(given, attend, positions)
        # The mean over the rows of all: FSDP averages gradients over processes, so each has its sum
        # divided by the rows that one process has on average.
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), reduction="sum"
        )
        (total * (1 if cp is None else cp.size) / (2 * ROWS)).backward()
        # --8<-- [end:step]
        optimizer.step()
        optimizer.zero_grad()
        total = total.detach()
        if cp is not None:
            dist.all_reduce(total)
        found.append(float(total) / (2 * ROWS))
    return found


def work(rank: int, file: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=PROCESSES)
    found, expected = losses(context_parallel()), losses()
    difference = max(abs(one - other) for one, other in zip(found, expected))
    print(f"process {rank}: losses {[round(x, 4) for x in found]}, difference {difference:.1e}")
    dist.destroy_process_group()
    if difference > 1e-4:
        raise SystemExit(1)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # Nothing has started a thread yet: a fork is safe, and saves each an import of torch.
        start = "fork" if sys.platform == "linux" else "spawn"
        rendezvous = str(Path(folder) / "rendezvous")
        mp.start_processes(work, (rendezvous,), nprocs=PROCESSES, start_method=start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
