# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a schedule moves and computes, and how long it should take.

Counted: visible pairs of each rank and step, bytes that a rank sends. Predicted from those: the
time of each step of a ring is the longer one of its arithmetic, at the speed of one device alone,
and of what travels beside it; what nothing hides, as in a gather, is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .parts import pairs_of, parts_of
from .shards import Shards

if TYPE_CHECKING:
    from .problem import Problem

# Of one H200, bfloat16, causal, 16k rows, by the larger head dim: TFLOP/s forward and backward,
# from bench/results/2026-11-28-forward-nvidia-h200.jsonl and 2026-11-29-backward-nvidia-h200.jsonl.
RATES = {64: (664.0, 613.0), 128: (840.0, 657.0), 256: (845.0, 640.0)}
LINK = 240.0  # GB/s in one direction between two H200 as NCCL gathers 128 MiB: the same folder's
# 2026-11-30-context-h200.jsonl
MEMORY = 4000.0  # GB/s, of merging partial results


@dataclass(frozen=True)
class Prediction:
    """What `ContextParallel.explain` says; `str` prints it.

    Attributes:
        layout, schedule: by name.
        ranks: (that gather or ring, that share rows by heads).
        steps: how many sets of keys a rank computes with.
        pairs: visible pairs of a head, of each rank; of documents and texts all that they may hide.
        balance: pairs of the mean rank over those of the one with most: 1 is even.
        sent: bytes that a rank sends, forward and backward.
        seconds: predicted, forward and backward.
        rate: predicted TFLOP/s a device, forward and backward.
    """

    layout: str
    schedule: str
    ranks: tuple[int, int]
    steps: int
    pairs: tuple[int, ...]
    sent: tuple[int, int]
    seconds: tuple[float, float]
    rate: tuple[float, float]

    @property
    def balance(self) -> float:
        return sum(self.pairs) / len(self.pairs) / max(1, *self.pairs)

    def __str__(self) -> str:
        lines = [
            f"layout {self.layout}, schedule {self.schedule}, {self.ranks[0]} x {self.ranks[1]} "
            "ranks (rows x heads)",
            f"steps {self.steps}, balance {self.balance:.3f}",
        ]
        for index, name in enumerate(("forward", "backward")):
            lines.append(
                f"{name}: sends {self.sent[index] / 1e6:.1f} MB, predicted "
                f"{1e3 * self.seconds[index]:.3f} ms, {self.rate[index]:.0f} TFLOP/s a device"
            )
        return "\n".join(lines)


def predict(
    shards: Shards,
    problem: Problem,
    q: tuple[int, ...],
    k: tuple[int, ...],
    dim_v: int | None = None,
    *,
    schedule: str = "gather",
    inner: int = 1,
    link: float | tuple[float, float] | None = None,
    rates: tuple[float, float] | None = None,
) -> Prediction:
    """The prediction for one call.

    Args:
        shards: which rows each rank has.
        problem: what the call asks for.
        q, k: (batch, head, row, dim) of the whole sequence.
        dim_v: head dim of v; None: that of k.
        schedule: "gather" or "ring", among the ranks that are left by `inner`.
        inner: ranks that share rows by heads.
        link: GB/s in one direction, or of two links, among ranks that share rows by heads and among
            the others; None: NVLink of an H200.
        rates: TFLOP/s of one device, forward and backward; None: those of an H200.
    """
    wide = k[3] if dim_v is None else dim_v
    outer = len(shards.segments) // inner
    merged = shards.merged(outer)
    table = _pairs(merged, problem, schedule)
    heads = q[0] * q[1] / inner
    per_pair = 2 * heads * (k[3] + wide)
    largest = max(k[3], wide)
    own = RATES[min((dim for dim in RATES if dim >= largest), default=max(RATES))]
    flops = [per_pair, 2.5 * per_pair]  # the backward pass has five products where that has two
    speed = [1e12 * x for x in (rates or own)]
    near, bandwidth = (1e9 * x for x in _two(LINK if link is None else link))
    rows = merged.most_rows
    kv = 2 * q[0] * k[1] / inner * rows * (k[3] + wide)  # bytes of k and v of a rank, in 16 bits
    exchanged = _exchanged(q, k, wide, inner, shards.most_rows)
    seconds, sent = [], []
    for is_backward in (0, 1):
        times = [
            [flops[is_backward] * pairs / speed[is_backward] for pairs in row] for row in table
        ]
        travels = kv * (1 + 2 * is_backward)  # gradients of keys go in float32
        if schedule == "ring":
            busy = sum(_step(times, step, kv / bandwidth, len(table[0]))
                       for step in range(len(table[0])))  # fmt: skip
            merging = 12 * heads * rows * wide / (1e9 * MEMORY) * (not is_backward)
            busy += (len(table[0]) - 1) * merging + is_backward * 2 * kv / bandwidth
            total = travels * (len(table[0]) - 1)
        else:
            total = travels * (outer - 1)
            busy = max(row[0] for row in times) + total / bandwidth
        both = exchanged * (1 + is_backward)
        seconds.append(busy + both / near)
        sent.append(round(total + both))
    mean = sum(map(sum, table)) / len(table)
    rate = tuple(f * mean / t / 1e12 if t else 0.0 for f, t in zip(flops, seconds))
    pairs = tuple(sum(row) for row in table)
    return Prediction(
        shards.name, schedule, (outer, inner), len(table[0]), pairs,
        (sent[0], sent[1]), (seconds[0], seconds[1]), (rate[0], rate[1]),
    )  # fmt: skip


def _two(link: float | tuple[float, float]) -> tuple[float, float]:
    return link if isinstance(link, tuple) else (link, link)


def _pairs(shards: Shards, problem: Problem, schedule: str) -> list[list[int]]:
    """Visible pairs of each rank, of each step."""
    size = len(shards.segments)
    whole = [segment for each in shards.segments for segment in each]
    found = []
    for rank, rows in enumerate(shards.segments):
        sources = [sorted(whole)]
        if schedule == "ring":
            sources = [list(shards.segments[(rank - step) % size]) for step in range(size)]
        found.append([
            sum(pairs_of(part) for part in parts_of(rows, keys, problem.band, join=False))
            for keys in sources
        ])  # fmt: skip
    while len(found[0]) > 1 and not any(row[-1] for row in found):
        found = [row[:-1] for row in found]
    return found


def _step(times: list[list[float]], step: int, travel: float, steps: int) -> float:
    return max(*(row[step] for row in times), travel if step + 1 < steps else 0.0)


def _exchanged(q: Any, k: Any, wide: int, inner: int, rows: int) -> float:
    """Bytes that a rank sends to share rows by heads: q, k, v there and o back."""
    if inner == 1:
        return 0.0
    per_row = q[1] * (k[3] + wide) + max(k[1], inner) * (k[3] + wide)
    bytes_: float = 2.0 * q[0] * rows * per_row * (inner - 1) / inner
    return bytes_
