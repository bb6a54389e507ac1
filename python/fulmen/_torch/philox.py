# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The lots of dropout (Philox4x32-10) as operations of torch, for what has no kernel of its own.

The same numbers as the library's: counter (kv_row / 8, q_row, batch * heads + head, offset), eight
16-bit numbers from each. Method: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .visibility import Geometry

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key each round: golden ratio, sqrt(3) - 1
ROUNDS = 10
WORD = 0xFFFFFFFF


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of x * factor, both below 2^32: in halves, int64 holds no 64-bit word."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & WORD


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox; words are int64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high2, low2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def drop_factors(dropout_p: float, rng: Tensor, where: Geometry, heads: int) -> Tensor:
    """What each probability is multiplied by: 0, or 1 over the share that is kept."""
    threshold = math.floor(dropout_p * 65536 + 0.5)
    seed, offset = rng[0], rng[1]
    i, j = where.q_position.view(1, 1, -1, 1), where.kv_position.view(1, 1, 1, -1)
    if where.q_sequence is None:
        batch = torch.arange(where.batch, device=rng.device).view(-1, 1, 1, 1)
    else:
        batch = where.q_sequence.view(1, 1, -1, 1)
    plane = batch * heads + torch.arange(heads, device=rng.device).view(1, -1, 1, 1)
    words = philox4x32(
        torch.broadcast_tensors(j // 8, i, plane, offset),
        (seed & WORD, (seed >> 32) & WORD),
    )
    place = j % 8
    word = torch.where(place // 2 == 0, words[0], words[1])
    word = torch.where(place // 2 == 2, words[2], word)
    word = torch.where(place // 2 == 3, words[3], word)
    number = (word >> (16 * (place % 2))) & 0xFFFF
    if threshold == 65536:
        return torch.zeros_like(number)
    kept: Any = number >= threshold
    return kept * (65536 / (65536 - threshold))
