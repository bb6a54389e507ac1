# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A small decoder of characters: trained in seconds, served over caches in pages.

It is built as decoders are today: RoPE, RMSNorm, SwiGLU, two query heads for each key/value head.
`Decoder.forward` is the plain model, for training and to compare with; `Decoder.step` is the same
network over a batch of requests whose earlier keys and values lie in pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import fulmen

TEXT = Path(__file__).resolve().parents[1] / "data" / "persuasion.txt"
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
WIDTH = HEADS * DIM
MOST_ROWS = 4096  # positions of the rotary tables


class Batch(NamedTuple):
    """The new tokens of several requests, one request after the other; all on the device."""

    tokens: torch.Tensor  # (row,)
    positions: torch.Tensor  # (row,) of each token in its request
    slots: torch.Tensor  # (row,) where its key and value go: page * page_size + row of the page
    cu_q: torch.Tensor  # (request + 1,)
    page_table: torch.Tensor  # (request, page)
    kv_lengths: torch.Tensor  # (request,) keys of each, new ones included
    last: torch.Tensor  # (request,) the last row of each


def rotary_tables(device=None):
    """cos and sin, (position, DIM / 2)."""
    frequency = 1e4 ** (-torch.arange(0, DIM, 2, device=device) / DIM)
    angle = torch.arange(MOST_ROWS, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotated(x, cos, sin):
    """Rotary embedding of (..., row, head, DIM) by (row, DIM / 2)."""
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, attend):
        every = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM))  # (..., row, head, dim)
        q, k, v = every.split([HEADS, KV_HEADS, KV_HEADS], -2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Decoder(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        cos, sin = rotary_tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def logits(self, x):
        return self.norm(x) @ self.tokens.weight.T

    def forward(self, tokens):
        """Logits of whole sequences (batch, row), without a cache."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]

        def attend(q, k, v):
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            return fulmen.attention(q, k, v, causal=True, layout="bshd")

        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.logits(x)

    # --8<-- [start:step]
    @torch.no_grad()
    def step(self, batch: Batch, k_pages, v_pages, invariant=False):
        """Logits of the last token of each request; pools are (layer, page, row, kv_head, dim)."""
        x = self.tokens(batch.tokens)
        for layer, block in enumerate(self.blocks):
            pools = k_pages[layer], v_pages[layer]

            def attend(q, k, v, pools=pools):
                # New keys are rotated into their pages, and queries on the way, in one kernel.
                q = fulmen.append_kv(
                    *pools, k, v, batch.slots, positions=batch.positions, cos=self.cos,
                    sin=self.sin, q=q, layout="shd",
                )  # fmt: skip
                return fulmen.attention_paged(
                    q, *pools, batch.page_table, batch.kv_lengths, cu_q=batch.cu_q, causal=True,
                    batch_invariant=invariant,
                )  # fmt: skip

            x = block(x, attend)
        return self.logits(x[batch.last])

    # --8<-- [end:step]


class Characters:
    """Text to numbers and back."""

    def __init__(self, text: str):
        self.letters = sorted(set(text))
        self.number = {c: i for i, c in enumerate(self.letters)}

    def encode(self, text: str) -> list[int]:
        """Characters that the text did not have are left out."""
        return [self.number[c] for c in text if c in self.number]

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.letters[i] for i in numbers)


def train(steps: int, device: str, advance=None, rows: int = 96, batch: int = 12):
    """A model of the text, and its characters; `advance(loss)` is called after each step."""
    text = TEXT.read_text()
    characters = Characters(text)
    numbers = torch.tensor(characters.encode(text))
    torch.manual_seed(1)
    model = Decoder(len(characters.letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    order = torch.Generator().manual_seed(2)
    for step in range(steps):
        for group in optimizer.param_groups:  # up, then down to nothing
            group["lr"] = 4e-3 * min((step + 1) / 20, 1 - step / steps)
        starts = torch.randint(0, len(numbers) - rows - 1, (batch, 1), generator=order)
        window = numbers[starts + torch.arange(rows + 1)].to(device)
        loss = functional.cross_entropy(
            model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if advance is not None:
            advance(float(loss.detach()))
    return model.eval().requires_grad_(False), characters
