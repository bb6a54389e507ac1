# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 2: the same numbers from a few keys at a time. Memory grows with rows alone.

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


def attention(q, k, v, causal=False, chunk=64):
    """O of q, k, v (batch, head, row, dim), `chunk` keys at a time."""
    num_q, num_kv = q.shape[-2], k.shape[-2]
    q = q / math.sqrt(q.shape[-1])
    m = q.new_full((*q.shape[:-1], 1), -math.inf)  # (batch, head, q_row, 1)
    l = torch.zeros_like(m)  # noqa: E741  the letter of the papers
    O = q.new_zeros(*q.shape[:-1], v.shape[-1])  # noqa: E741  (batch, head, q_row, dim)
    i = torch.arange(num_q, device=q.device)[:, None] + num_kv - num_q
    for first in range(0, num_kv, chunk):
        Kc, Vc = k[..., first : first + chunk, :], v[..., first : first + chunk, :]
        S = q @ Kc.mT
        if causal:
            j = torch.arange(first, first + Kc.shape[-2], device=q.device)
            S = S.masked_fill(j > i, -math.inf)
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        # A row that has seen no key yet has m_new = -inf: -inf - -inf would be NaN.
        level = m_new.masked_fill(m_new == -math.inf, 0.0)
        P, shrink = torch.exp(S - level), torch.exp(m - level)
        l = l * shrink + P.sum(-1, keepdim=True)  # noqa: E741
        O = O * shrink + P @ Vc  # noqa: E741
        m = m_new
    return O / l.masked_fill(l == 0, 1.0)


def main() -> int:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 333, 64)
    difference = (attention(q, k, v, True) - naive.attention(q, k, v, True)).abs().max()
    print(f"chunked: {q.shape[2] * 64 * 4} scores held at once, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
