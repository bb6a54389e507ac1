# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Rung 1: attention as it is written down. Memory grows with rows x keys.

    S = Q K^T / sqrt(d);    P = softmax(S);    O = P V

python examples/ladder/naive.py    prints the largest difference to fulmen; ends with 1 if large
"""

from __future__ import annotations

import math
import sys

try:
    import torch
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen


def attention(q, k, v, causal=False):
    """O of q, k, v (batch, head, row, dim): three lines, one matrix of rows x keys per head."""
    S = q @ k.mT / math.sqrt(q.shape[-1])  # (batch, head, q_row, kv_row)
    if causal:
        hidden = torch.ones_like(S, dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
        S = S.masked_fill(hidden, -math.inf)
    return torch.softmax(S, dim=-1) @ v


def main() -> int:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 333, 64)
    difference = (attention(q, k, v, True) - fulmen.attention(q, k, v, causal=True)).abs().max()
    print(f"naive: {q.shape[2] ** 2 * 4} scores held at once, difference {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
