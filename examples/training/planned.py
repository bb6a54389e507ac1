# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A plan that is run many times; on a GPU, inside a CUDA graph.

plan() decides and compiles; a run allocates nothing but its results and reads whatever the arrays
hold by then, so that a captured graph can be replayed on new contents.

python examples/training/planned.py    ends with 1 if a replay differs from a plain call
"""

from __future__ import annotations

import sys

try:
    import torch
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 4, 128, 64, device=device) for _ in range(3))
    lengths = torch.tensor([128], device=device)

    # --8<-- [start:plan]
    plan = fulmen.plan(q, k, v, causal=True, kv_lengths=lengths, need=())
    out = torch.empty_like(q)
    scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)

    def step():
        plan.forward(q, k, v, out=out, workspace=scratch)
        # --8<-- [end:plan]

    step()
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    worst = 0.0
    for length in (128, 77, 1):
        q.normal_()
        k.normal_()
        lengths.fill_(length)
        step()
        expected = fulmen.attention(q, k, v, causal=True, kv_lengths=lengths)
        worst = max(worst, float((out - expected).abs().max()))
    print(f"{plan.workspace_bytes} bytes of workspace, difference {worst:.1e} on {device}")
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
