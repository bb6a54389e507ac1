# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 3: the loop of chunked.py as one kernel for a GPU, in Triton.

One program computes BLOCK_Q rows of one head: its queries stay in registers, keys and values pass
by in tiles of BLOCK_KV, and nothing of size rows x keys ever reaches memory. With causal=True it
stops at the diagonal. exp is computed as exp2, one instruction, with log2(e) put into the scale.
Which tile, how many warps and how many stages of loads is a search: triton.autotune times TILES.

python examples/ladder/triton_forward.py    prints the difference to naive; ends with 1 if large
TRITON_INTERPRET=1 runs it on the CPU, slowly.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

try:
    import torch
    import triton
    import triton.language as tl
except ImportError:
    print("this example needs PyTorch and Triton: pip install torch triton")
    sys.exit(0)

sys.path.insert(0, str(Path(__file__).parent))
import naive

LOG2_E = math.log2(math.e)


# --8<-- [start:search]
# What is tried for each head dim and mask, once a process; the fastest is kept. The interpreter
# takes the first.
TILES = [
    triton.Config({"BLOCK_Q": rows, "BLOCK_KV": keys}, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in (
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
]  # fmt: skip
# --8<-- [end:search]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def worth_trying(configs, arrays, **sizes):
    """Float32 products run on the ordinary units, where a large tile takes the compiler minutes."""
    return configs[:1] if arrays["Q"].dtype == torch.float32 else configs


def searched(configs):
    """Decorates a kernel: the fastest of the configs, for each head dim, mask and type."""
    return triton.autotune(configs[:1] if INTERPRETED else configs, key=["DIM", "IS_CAUSAL"],
                           prune_configs_by={"early_config_prune": worth_trying})  # fmt: skip


@searched(TILES)
@triton.jit
def forward(Q, K, V, Out, Lse, num_q, num_kv, scale_log2, DIM: tl.constexpr,
            IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):  # fmt: skip
    """O and lse of one block of query rows; arrays are (batch * head, row, dim), contiguous.

    lse (batch * head, row) is log2 of the row sum of exp2(scale_log2 q k); 0 of a row without keys.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, DIM)
    q_at = (head * num_q + rows[:, None]) * DIM + dims[None, :]
    q = tl.load(Q + q_at, mask=rows[:, None] < num_q, other=0.0)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
    o = tl.zeros([BLOCK_Q, DIM], tl.float32)
    shift = num_kv - num_q
    end = num_kv
    if IS_CAUSAL:
        end = tl.minimum(num_kv, (tl.program_id(0) + 1) * BLOCK_Q + shift)
    # --8<-- [start:loop]
    for first in range(0, end, BLOCK_KV):
        keys = first + tl.arange(0, BLOCK_KV)
        kv_at = (head * num_kv + keys[:, None]) * DIM + dims[None, :]
        k = tl.load(K + kv_at, mask=keys[:, None] < num_kv, other=0.0)
        v = tl.load(V + kv_at, mask=keys[:, None] < num_kv, other=0.0)
        # S = Q K^T
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = keys[None, :] < num_kv
        if IS_CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + shift)
        s = tl.where(visible, s, float("-inf"))
        # P = exp(S - m_new)
        m_new = tl.maximum(m, tl.max(s, 1))
        level = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - level[:, None])
        shrink = tl.exp2(m - level)
        # O = O exp(m - m_new) + P V
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    # --8<-- [end:loop]
    seen = l > 0
    l = tl.where(seen, l, 1.0)  # noqa: E741
    tl.store(Out + q_at, (o / l[:, None]).to(Out.dtype.element_ty), mask=rows[:, None] < num_q)
    lse = tl.where(seen, m + tl.log2(l), 0.0)
    tl.store(Lse + head * num_q + rows, lse, mask=rows < num_q)


def attention_forward(q, k, v, causal=False):
    """O and lse, which the backward pass needs; q, k, v contiguous, in the axes of `attention`."""
    batch, heads, num_q, dim = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(batch, heads, num_q, device=q.device, dtype=torch.float32)
    scale_log2 = LOG2_E / math.sqrt(dim)

    def grid(tile):
        return triton.cdiv(num_q, tile["BLOCK_Q"]), batch * heads

    forward[grid](q, k, v, o, lse, num_q, k.shape[2], scale_log2, dim, causal)
    return o, lse


def attention(q, k, v, causal=False):
    """O of q, k, v (batch, head, row, dim), dim 16, 32, 64 or 128; as many heads in each."""
    return attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), causal)[0]


def main() -> int:
    if not torch.cuda.is_available() and not INTERPRETED:
        print("this example needs a GPU, or TRITON_INTERPRET=1")
        return 0
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 2, 100, 32, device=device)
    difference = (attention(q, k, v, True) - naive.attention(q, k, v, True)).abs().max()
    print(f"triton: one tile of scores held by a program, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
