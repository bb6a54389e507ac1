# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains a small decoder with fulmen's attention, eager or compiled, on the CPU or a GPU.

python examples/training/gpt.py [--steps 50] [--compile] [--sdpa]

The task: sequences of digits that repeat after a period of 3 or 4; only attention can look back far
enough to foretell them. Ends with 1 if the loss does not fall below half of chance.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen

VOCABULARY, ROWS, BATCH, DIM, HEADS, LAYERS = 10, 24, 16, 32, 4, 2


# --8<-- [start:layer]
class Attention(nn.Module):
    """Causal self-attention: the one line that differs from any other decoder is `attend`."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)  # (batch, row, head, dim)
        return self.out(self.attend(q, k, v).flatten(2))


def by_fulmen(q, k, v):
    return fulmen.attention(q, k, v, causal=True, layout="bshd")
    # --8<-- [end:layer]


def by_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention = Attention(attend)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.places = nn.Embedding(ROWS, DIM)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.tokens(x) + self.places(places)))


def batch(device):
    """Digits (BATCH, ROWS + 1) that repeat with a period of 3 or 4."""
    period = torch.randint(3, 5, (BATCH, 1), device=device)
    digits = torch.randint(0, VOCABULARY, (BATCH, 4), device=device)
    return digits.gather(1, torch.arange(ROWS + 1, device=device) % period)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--sdpa", action="store_true", help="torch's attention, to compare with")
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(by_torch if asked.sdpa else by_fulmen).to(device)
    step_model = torch.compile(model, fullgraph=True) if asked.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = time.perf_counter()
    losses = []
    for _ in range(asked.steps):
        digits = batch(device)
        logits = step_model(digits[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), digits[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = sum(losses[-5:]) / 5
    took = time.perf_counter() - start
    print(f"loss {losses[0]:.2f} -> {last:.2f} in {asked.steps} steps, {took:.1f} s on {device}")
    return int(last > math.log(VOCABULARY) / 2)


if __name__ == "__main__":
    sys.exit(main())
