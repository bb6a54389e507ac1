# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Ring attention: each process holds a part of the sequence; keys and values travel in a ring.

Each process attends from its rows to the keys that are with it, in float32, passes the keys on, and
merges what it got by (o, lse): exact, since merge is. Causal: the part of the diagonal is causal,
parts of earlier rows are seen whole, later ones not at all (a balanced ring would deal the rows out
in zigzag). Gradients flow through merge, lse and the exchange, whose transpose sends the other way
round.

python examples/distributed/ring_attention.py    two processes on this machine (gloo) against one
call; ends with 1 if they differ
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen

PROCESSES, ROWS, HEADS, DIM = 2, 96, 4, 32


class PassOn(torch.autograd.Function):
    """Sends a tensor to the next process and receives the one of the process before."""

    @staticmethod
    def forward(ctx, x, step=1):
        ctx.step = step
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        requests = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x.contiguous(), (rank + step) % size),
            dist.P2POp(dist.irecv, received, (rank - step) % size),
        ])  # fmt: skip
        for request in requests:
            request.wait()
        return received

    @staticmethod
    def backward(ctx, gradient):
        return PassOn.apply(gradient, -ctx.step), None


# --8<-- [start:ring]
def ring_attention(q, k, v):
    """Causal attention of this process's rows (batch, head, row, dim) to all rows before them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = []
    for step in range(size):
        owner = (rank - step) % size  # whose keys are here now
        # Keys of later rows are hidden, all of them: o = 0, lse = -inf, no gradient. They take
        # part all the same, so that every process is there when the ring runs backward.
        lengths = None if owner <= rank else torch.zeros(q.shape[0], dtype=torch.int32)
        parts.append(
            fulmen.attention(
                q,
                k,
                v,
                causal=owner == rank,
                kv_lengths=lengths,
                return_lse=True,
                out_dtype=torch.float32,
            )
        )
        if step + 1 < size:
            k, v = PassOn.apply(torch.stack([k, v])).unbind()
    o, _ = fulmen.merge(parts)
    return o.to(q.dtype)
    # --8<-- [end:ring]


def work(rank: int, file: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, ROWS, DIM, requires_grad=True) for _ in range(3)]
    do = torch.randn(1, HEADS, ROWS, DIM)
    own = slice(rank * ROWS // PROCESSES, (rank + 1) * ROWS // PROCESSES)
    mine = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    o = ring_attention(*mine)
    found = torch.autograd.grad(o, mine, do[:, :, own])
    expected = fulmen.attention(*whole, causal=True)
    gradients = torch.autograd.grad(expected, whole, do)
    difference = max(
        float((ours - theirs[:, :, own]).abs().max().detach())
        for ours, theirs in zip((o, *found), (expected, *gradients))
    )
    print(f"process {rank}: rows {own.start} to {own.stop - 1}, difference {difference:.1e}")
    dist.destroy_process_group()
    if difference > 1e-5:
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
