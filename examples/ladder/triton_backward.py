# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 4: gradients, in two kernels for a GPU, in Triton. P is computed again, never stored.

With the lse of each row, which the forward pass kept,

    P = exp(scale Q K^T - lse);    dV = P^T dO;    dP = dO V^T;    D = rowsum(dO * O)
    dS = P * (dP - D);    dQ = scale dS K;    dK = scale dS^T Q

dQ is a sum over keys, dK and dV are sums over queries. So there is a kernel for each: a program has
BLOCK_Q rows of dQ, and keys pass by; a program has BLOCK_KV rows of dK and dV, and queries pass by.
S and dP are computed twice, and in return no two programs add to the same number.

Source: Dao et al., FlashAttention (2022), section 3.1 and appendix B.2; FlashAttention-2 (2023).

python examples/ladder/triton_backward.py    prints the difference to naive; ends with 1 if large
TRITON_INTERPRET=1 runs it on the CPU, slowly.
"""

from __future__ import annotations

import math
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
import triton_forward

TILES = [
    triton.Config({"BLOCK_Q": rows, "BLOCK_KV": keys}, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in ((64, 64, 4, 2), (64, 64, 8, 3), (128, 32, 4, 2),
                                      (32, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2))
]  # fmt: skip


@triton_forward.searched(TILES)
@triton.jit
def gradient_of_q(Q, K, V, Out, dOut, Lse, dQ, D, num_q, num_kv, scale, scale_log2,
                  DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr,
                  BLOCK_KV: tl.constexpr):  # fmt: skip
    """dQ of one block of query rows, and D (batch * head, row), which gradient_of_kv needs."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, DIM)
    q_at = (head * num_q + rows[:, None]) * DIM + dims[None, :]
    inside = rows[:, None] < num_q
    q = tl.load(Q + q_at, mask=inside, other=0.0)
    do = tl.load(dOut + q_at, mask=inside, other=0.0)
    o = tl.load(Out + q_at, mask=inside, other=0.0)
    lse = tl.load(Lse + head * num_q + rows, mask=rows < num_q, other=0.0)
    d = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(D + head * num_q + rows, d, mask=rows < num_q)
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    shift = num_kv - num_q
    end = num_kv
    if IS_CAUSAL:
        end = tl.minimum(num_kv, (tl.program_id(0) + 1) * BLOCK_Q + shift)
    for first in range(0, end, BLOCK_KV):
        keys = first + tl.arange(0, BLOCK_KV)
        kv_at = (head * num_kv + keys[:, None]) * DIM + dims[None, :]
        k = tl.load(K + kv_at, mask=keys[:, None] < num_kv, other=0.0)
        v = tl.load(V + kv_at, mask=keys[:, None] < num_kv, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = keys[None, :] < num_kv
        if IS_CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + shift)
        p = tl.where(visible, tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - d[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    tl.store(dQ + q_at, (scale * dq).to(dQ.dtype.element_ty), mask=inside)


@triton_forward.searched(TILES)
@triton.jit
def gradient_of_kv(Q, K, V, dOut, Lse, D, dK, dV, num_q, num_kv, scale, scale_log2,
                   DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr,
                   BLOCK_KV: tl.constexpr):  # fmt: skip
    """dK and dV of one block of keys."""
    head = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_KV + tl.arange(0, BLOCK_KV)
    dims = tl.arange(0, DIM)
    kv_at = (head * num_kv + keys[:, None]) * DIM + dims[None, :]
    inside = keys[:, None] < num_kv
    k = tl.load(K + kv_at, mask=inside, other=0.0)
    v = tl.load(V + kv_at, mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_KV, DIM], tl.float32)
    dv = tl.zeros([BLOCK_KV, DIM], tl.float32)
    shift = num_kv - num_q
    begin = 0
    if IS_CAUSAL:  # the first block of queries that sees one of these keys
        begin = tl.maximum(tl.program_id(0) * BLOCK_KV - shift, 0) // BLOCK_Q * BLOCK_Q
    # --8<-- [start:loop]
    for first in range(begin, num_q, BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        q_at = (head * num_q + rows[:, None]) * DIM + dims[None, :]
        q = tl.load(Q + q_at, mask=rows[:, None] < num_q, other=0.0)
        do = tl.load(dOut + q_at, mask=rows[:, None] < num_q, other=0.0)
        lse = tl.load(Lse + head * num_q + rows, mask=rows < num_q, other=0.0)
        d = tl.load(D + head * num_q + rows, mask=rows < num_q, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = rows[:, None] < num_q
        if IS_CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + shift)
        p = tl.where(visible, tl.exp2(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - d[:, None])
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    # --8<-- [end:loop]
    tl.store(dK + kv_at, (scale * dk).to(dK.dtype.element_ty), mask=inside)
    tl.store(dV + kv_at, dv.to(dV.dtype.element_ty), mask=inside)


def attention_backward(do, q, k, v, o, lse, causal=False):
    """dQ, dK and dV, of what triton_forward.attention_forward took and gave; do contiguous."""
    batch, heads, num_q, dim = q.shape
    num_kv = k.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    D = torch.empty_like(lse)
    scale = 1 / math.sqrt(dim)
    sizes = (num_q, num_kv, scale, scale * triton_forward.LOG2_E, dim, causal)

    def by_rows(tile):
        return triton.cdiv(num_q, tile["BLOCK_Q"]), batch * heads

    def by_keys(tile):
        return triton.cdiv(num_kv, tile["BLOCK_KV"]), batch * heads

    gradient_of_q[by_rows](q, k, v, o, do, lse, dq, D, *sizes)
    gradient_of_kv[by_keys](q, k, v, do, lse, D, dk, dv, *sizes)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = triton_forward.attention_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, do):
        return *attention_backward(do.contiguous(), *ctx.saved_tensors, ctx.causal), None


def attention(q, k, v, causal=False):
    """As triton_forward.attention; autograd knows its gradients."""
    return _Attention.apply(q, k, v, causal)


def main() -> int:
    if not torch.cuda.is_available() and not triton_forward.INTERPRETED:
        print("this example needs a GPU, or TRITON_INTERPRET=1")
        return 0
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, do = torch.randn(4, 1, 2, 100, 32, device=device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(attention(*inputs, True), inputs, do)
    expected = torch.autograd.grad(naive.attention(*inputs, True), inputs, do)
    difference = max(float((x - y).abs().max()) for x, y in zip(found, expected))
    print(f"triton backward: two kernels, S computed in each, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
