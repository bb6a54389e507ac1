# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains a character model on a novel, with fulmen's attention beside torch's in float32.

python examples/train_lm/train.py [--tiny] [--rows 2048] [--steps 300] [-o curves.jsonl]

The model is a small decoder as they are built today (RoPE, RMSNorm, SwiGLU, 2 query heads for each
key/value head). Each run starts from the same weights and sees the same text in the same order;
only the attention and the precision differ. The last lines say how far each loss curve lies from
that of torch in float32, and what a step took. plot.py draws the curves. --tiny, and without a GPU:
a smaller model and 40 steps, in seconds; it ends with 1 if the loss does not fall, or if the two
float32 curves differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

import fulmen

TEXT = Path(__file__).resolve().parents[1] / "data" / "persuasion.txt"
DIM = 64  # of a head
REFERENCE = "torch float32"
RUNS = {
    REFERENCE: ("torch", torch.float32),
    "fulmen float32": ("fulmen", torch.float32),
    "torch bfloat16": ("torch", torch.bfloat16),
    "fulmen bfloat16": ("fulmen", torch.bfloat16),
}


def by_fulmen(q, k, v):
    return fulmen.attention(q, k, v, causal=True)


def by_torch(q, k, v):
    if q.dtype is torch.float32:  # torch's fused kernel for it has no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


ATTENTION = {"fulmen": by_fulmen, "torch": by_torch}


def rotated(x, positions):
    """Rotary embedding of (batch, head, row, dim) by the rows' positions."""
    frequency = 1e4 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angle = positions[:, None] * frequency
    left, right = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self, heads, attend):
        super().__init__()
        width, self.heads, self.kv_heads = heads * DIM, heads, heads // 2
        self.attend = attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, positions):
        every = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = every.split([self.heads, self.kv_heads, self.kv_heads], 1)
        o = self.attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Decoder(nn.Module):
    def __init__(self, vocabulary, layers, heads, attend):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, heads * DIM)
        self.blocks = nn.ModuleList(Block(heads, attend) for _ in range(layers))
        self.norm = nn.RMSNorm(heads * DIM)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x, positions):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x, positions)
        return self.norm(x) @ self.tokens.weight.T


def numbered():
    """The text, each character as its number."""
    characters = TEXT.read_bytes()
    numbers = {c: i for i, c in enumerate(sorted(set(characters)))}
    return torch.tensor([numbers[c] for c in characters])


def losses(name, text, asked, device):
    """The loss of every step, and milliseconds a step."""
    attention, dtype = RUNS[name]
    torch.manual_seed(1)
    vocabulary = int(text.max()) + 1
    with torch.device(device):
        model = Decoder(vocabulary, asked.layers, asked.heads, ATTENTION[attention])
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.rate, betas=(0.9, 0.95))
    order = torch.Generator().manual_seed(2)
    positions = torch.arange(asked.rows, device=device)
    found, times = [], []
    for step in range(asked.steps):
        for group in optimizer.param_groups:  # 20 steps of warm-up
            group["lr"] = asked.rate * min(1.0, (step + 1) / 20)
        starts = torch.randint(0, len(text) - asked.rows - 1, (asked.batch, 1), generator=order)
        window = text[starts + torch.arange(asked.rows + 1)].to(device)
        begin = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(window[:, :-1], positions)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))  # waits for the GPU
        times.append((time.perf_counter() - begin) * 1e3)
    return found, statistics.median(times)


def smoothed(curve, width=20):
    return [statistics.fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("-o", "--output")
    asked = parser.parse_args(arguments)
    asked.tiny = asked.tiny or not torch.cuda.is_available()
    if asked.tiny:
        asked.rows, asked.batch, asked.steps, asked.layers, asked.heads = 48, 8, 40, 1, 2
        asked.rate, asked.runs = 4e-3, [REFERENCE, "fulmen float32"]
    return asked


def main(arguments=None) -> int:
    asked = parsed(arguments)
    text = numbered()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    curves = {}
    for name in asked.runs:
        curves[name], took = losses(name, text, asked, device)
        print(f"{name:16} loss {curves[name][0]:.3f} -> {smoothed(curves[name])[-1]:.3f}, "
              f"{took:.2f} ms a step on {where}", flush=True)  # fmt: skip
        if asked.output:
            line = {
                "run": name, "rows": asked.rows, "batch": asked.batch, "card": where,
                "layers": asked.layers, "heads": asked.heads, "torch": torch.__version__,
                "ms": round(took, 3), "loss": [round(x, 5) for x in curves[name]],
            }  # fmt: skip
            with open(asked.output, "a") as file:
                file.write(json.dumps(line) + "\n")
    base = curves.get(REFERENCE)
    gaps = {}
    for name, curve in curves.items():
        if base is not None and name != REFERENCE:
            pairs = zip(smoothed(curve), smoothed(base))
            gaps[name] = max(abs(ours - theirs) for ours, theirs in pairs)
            print(f"{name:16} at most {gaps[name]:.4f} from {REFERENCE}, mean of 20 steps")
    if not asked.tiny:
        return 0
    last = smoothed(base)[-1]
    return int(last > 0.75 * base[0] or gaps["fulmen float32"] > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
