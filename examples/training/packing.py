# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths without padding: packed rows and offsets.

python examples/training/packing.py    outputs and gradients against the padded batch; ends with 1
if they differ.
"""

from __future__ import annotations

import sys

try:
    import torch
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen

LENGTHS, HEADS, DIM = (57, 3, 0, 120), 4, 32


def main() -> int:
    torch.manual_seed(0)
    longest, total = max(LENGTHS), sum(LENGTHS)
    padded = [torch.zeros(len(LENGTHS), longest, HEADS, DIM) for _ in range(3)]
    for x in padded:
        for entry, length in enumerate(LENGTHS):
            x[entry, :length] = torch.randn(length, HEADS, DIM)
    lengths = torch.tensor(LENGTHS)
    used = torch.arange(longest) < lengths[:, None]  # (batch, row)

    # --8<-- [start:packed]
    q, k, v = (x[used].requires_grad_() for x in padded)  # (total, head, dim): no padding left
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # sequence b: its rows
    o = fulmen.attention_varlen(q, k, v, offsets, offsets, causal=True)
    o.square().sum().backward()
    # --8<-- [end:packed]

    q2, k2, v2 = (x.requires_grad_() for x in padded)
    wide = fulmen.attention(
        q2, k2, v2, causal=True, layout="bshd", q_lengths=lengths, kv_lengths=lengths
    )
    wide.square().sum().backward()
    pairs = [(o, wide), (q.grad, q2.grad), (k.grad, k2.grad), (v.grad, v2.grad)]
    difference = max(float((mine - theirs[used]).detach().abs().max()) for mine, theirs in pairs)
    saved = 1 - total / (longest * len(LENGTHS))
    print(
        f"{total} rows instead of {longest * len(LENGTHS)} ({saved:.0%} fewer), "
        f"difference {difference:.1e}"
    )
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
