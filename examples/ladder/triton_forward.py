# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 3: the loop of chunked.py as one kernel for a GPU, in Triton.

One program computes BLOCK_Q rows of one head: its queries stay in registers, keys and values pass
by in tiles of BLOCK_KV, and nothing of size rows x keys ever reaches memory. With causal=True it
stops at the diagonal. exp is computed as exp2, one instruction, with log2(e) put into the scale.

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


@triton.jit
def forward(Q, K, V, Out, num_q, num_kv, scale_log2, DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
            BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr):  # fmt: skip
    """O of one block of query rows; arrays are (batch * head, row, dim), contiguous."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, DIM)
    q_at = head * num_q * DIM + rows[:, None] * DIM + dims[None, :]
    q = tl.load(Q + q_at, mask=rows[:, None] < num_q, other=0.0)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
    o = tl.zeros([BLOCK_Q, DIM], tl.float32)
    shift = num_kv - num_q
    end = num_kv
    if IS_CAUSAL:
        end = tl.minimum(num_kv, (tl.program_id(0) + 1) * BLOCK_Q + shift)
    for first in range(0, end, BLOCK_KV):
        keys = first + tl.arange(0, BLOCK_KV)
        kv_at = head * num_kv * DIM + keys[:, None] * DIM + dims[None, :]
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
    o = o / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(Out + q_at, o.to(Out.dtype.element_ty), mask=rows[:, None] < num_q)


def attention(q, k, v, causal=False):
    """O of q, k, v (batch, head, row, dim), dim 16, 32, 64 or 128."""
    batch, heads, num_q, dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    block = 64
    grid = (triton.cdiv(num_q, block), batch * heads)
    scale = LOG2_E / math.sqrt(dim)
    forward[grid](q, k, v, o, num_q, k.shape[2], scale, dim, block, block, causal)
    return o


def main() -> int:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        print("this example needs a GPU, or TRITON_INTERPRET=1")
        return 0
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 2, 100, 32, device=device)
    difference = (attention(q, k, v, True) - naive.attention(q, k, v, True)).abs().max()
    print(f"triton: tiles of 64 x 64 held at once, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
