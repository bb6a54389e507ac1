# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs a problem through a plan: results, times, and the exact bytes that it takes.

The problem is in host memory; where the plan runs is a place, which copies arrays there and back.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

import fulmen
from fulmen.lab.cases.arrays import Array
from fulmen.layouts import phantom

ENOUGH_SECONDS = 0.5  # repeats of one operation end here, after at least 3
MOST_REPEATS = 100


@dataclass
class Measured:
    """One operation of one problem."""

    explanation: fulmen.Explanation
    seconds: list[float]
    flops: float
    memory_bytes: int  # workspace and outputs: all that is allocated beside the inputs
    workspace_bytes: int

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return statistics.median(self.seconds)


class Host:
    """The place where arrays are already. A GPU is another: fulmen.lab.gpu_memory.GpuMemory."""

    def put(self, x: Array) -> Array:
        """The array there."""
        return x

    def get(self, x: Array) -> Array:
        """The array in host memory."""
        return x

    def wait(self) -> None:
        """Until all work is done."""


def run(
    tensors: dict[str, Array],
    options: dict[str, Any],
    need: tuple[str, ...],
    repeat: int,
    advance: Callable[[int], None],
    place: Any,
) -> tuple[dict[str, Array], dict[str, Measured]]:
    """Forward, and backward where gradients are needed.

    Args:
        tensors: q, k, v and do.
        options: of fulmen.attention_forward.
        need: the gradients; () for none.
        repeat: how often each is timed; 0: as often as gives a steady median.
        advance: told 1 after each operation.
        place: where it runs, Host or the like; a time ends when the work there is done.

    Returns:
        Results by name (o, lse, dq, ..) and measurements by operation.

    Raises:
        fulmen.Error: as fulmen.attention_forward.
    """
    q, k, v, do = (
        None if (x := tensors.get(name)) is None else place.put(x) for name in ("q", "k", "v", "do")
    )
    there = {n: place.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    plan = fulmen.plan(q, k, v, need=need, **there)
    forward, seconds = timed(lambda: plan.forward(q, k, v), repeat, place.wait)
    advance(1)
    results = {"o": place.get(forward.o), "lse": place.get(forward.lse)}
    written = [x for x in forward if x is not None]
    found = {"forward": _measured(plan, "forward", seconds, written, tensors, options)}
    if need:
        saved = forward.o, forward.stats
        gradients, seconds = timed(lambda: plan.backward(do, q, k, v, *saved), repeat, place.wait)
        advance(1)
        named = {n: place.get(x) for n, x in gradients._asdict().items() if x is not None}
        results.update(named)
        outputs = list(named.values())
        found["backward"] = _measured(plan, "backward", seconds, outputs, tensors, options)
    return results, found


def timed(
    work: Callable[[], Any], repeat: int, wait: Callable[[], None]
) -> tuple[Any, list[float]]:
    """The result of the first call, which warms up, and the times of those after it.

    Args:
        work: what is timed.
        repeat: how often; 0: as often as gives a steady median.
        wait: returns when work that a call began is done.
    """
    result = work()
    wait()
    seconds: list[float] = []
    while True:
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
        done = len(seconds)
        if repeat and done >= repeat:
            break
        if not repeat and (done >= MOST_REPEATS or (done >= 3 and sum(seconds) > ENOUGH_SECONDS)):
            break
    return result, seconds


def _measured(
    plan: fulmen.Plan,
    operation: str,
    seconds: list[float],
    outputs: list[Array],
    tensors: dict[str, Array],
    options: dict[str, Any],
) -> Measured:
    explanation = plan.explain(operation)
    workspace = int(explanation["workspace_bytes"])
    total = workspace + sum(x.nbytes for x in outputs)
    flops = exact_flops(explanation, operation, tensors, options)
    return Measured(explanation, seconds, flops, total, workspace)


def exact_flops(
    explanation: fulmen.Explanation,
    operation: str,
    tensors: dict[str, Array],
    options: dict[str, Any],
) -> float:
    """Arithmetic of a call: that of its plan, or with packed sequences that of each alone.

    A plan knows upper bounds of lengths only; here the lengths are at hand.
    """
    if "cu_q" not in options:
        return float(explanation["flops"])
    head_axis = 1 if options["layout"] == "shd" else 0
    q, k, v = (tensors[name] for name in "qkv")
    kept = {n: options[n] for n in ("causal", "alignment", "window") if n in options}
    total = 0.0
    for sq, skv in zip(np.diff(options["cu_q"]).tolist(), np.diff(options["cu_kv"]).tolist()):
        alone = [
            phantom((1, x.shape[head_axis], rows, x.shape[2]), x.dtype)
            for x, rows in ((q, sq), (k, skv), (v, skv))
        ]
        total += fulmen.explain(*alone, operation=operation, **kept)["flops"]
    return total
