# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 2: the same numbers from a few rows and keys at a time. Memory grows with rows alone.

Online softmax: of the keys so far, keep the row maximum m, the row sum l and the output O, all
relative to m. A new chunk may raise m; what was summed before is then scaled down by
exp(m - m_new).

    S = Q Kc^T / sqrt(d);    m_new = max(m, rowmax S);    P = exp(S - m_new)
    l = l exp(m - m_new) + rowsum P;    O = O exp(m - m_new) + P Vc;    at the end O / l

Source: Milakov and Gimelshein (2018); Rabe and Staats (2021); Dao et al., FlashAttention (2022).

python examples/ladder/chunked.py    prints the largest difference to naive; ends with 1 if large
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

try:
    import torch
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

sys.path.insert(0, str(Path(__file__).parent))
import naive


def attention(q, k, v, causal=False, block_m=128, block_n=64, kv_lengths=None):
    """O of q, k, v (batch, head, row, dim), block_m queries and block_n keys at a time.

    kv_lengths: (batch,), keys from there on are padding and are not seen. Sums run in float32 for
    16-bit inputs; P is rounded to their type before it meets V.
    """
    O = q.new_empty(*q.shape[:-1], v.shape[-1])  # noqa: E741
    for first in range(0, q.shape[-2], block_m):
        rows = slice(first, first + block_m)
        shift = k.shape[-2] - q.shape[-2] + first
        O[..., rows, :] = _rows(q[..., rows, :], k, v, causal, shift, block_n, kv_lengths)
    return O


def _rows(q, k, v, causal, shift, block_n, kv_lengths):
    """Some rows of O; with `causal` row i of q sees the keys up to i + shift."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[-1])
    m = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=wide)  # (batch, head, q_row, 1)
    l = torch.zeros_like(m)  # noqa: E741  the letter of the papers
    O = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)  # noqa: E741  (batch, head, q_row, dim)
    i = torch.arange(q.shape[-2], device=q.device)[:, None] + shift
    end = min(k.shape[-2], max(shift + q.shape[-2], 0)) if causal else k.shape[-2]
    for first in range(0, end, block_n):
        Kc, Vc = k[..., first : first + block_n, :], v[..., first : first + block_n, :]
        S = scale * (q @ Kc.mT).to(wide)
        j = torch.arange(first, first + Kc.shape[-2], device=q.device)
        if causal:
            S = S.masked_fill(j > i, -math.inf)
        if kv_lengths is not None:
            S = S.masked_fill(j >= kv_lengths[:, None, None, None], -math.inf)
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        # A row that has seen no key yet has m_new = -inf: -inf - -inf would be NaN.
        level = m_new.masked_fill(m_new == -math.inf, 0.0)
        P, shrink = torch.exp(S - level), torch.exp(m - level)
        l = l * shrink + P.sum(-1, keepdim=True)  # noqa: E741
        O = O * shrink + (P.to(v.dtype) @ Vc).to(wide)  # noqa: E741
        m = m_new
    return (O / l.masked_fill(l == 0, 1.0)).to(q.dtype)


def main() -> int:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 333, 64)
    difference = (attention(q, k, v, True) - naive.attention(q, k, v, True)).abs().max()
    print(f"chunked: {128 * 64 * 4} scores held at once, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
