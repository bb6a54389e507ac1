# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How sides are timed so that the answer is true.

A card's clock follows its power: a kernel timed after a slow one runs faster, by up to 30 %. So all
sides of a cell are timed in random order, in several rounds, with an idle gap and two warm calls
before each round (burst), or each from an equally hot card (sustained). The L2 cache is flushed
before each call. On the CPU threads of a library go on looking for work after its calls, for
milliseconds, on processors that the next side needs: there too an idle gap and a warm call precede
each side's round.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Call = Callable[[], Any]

ROUNDS = 5
IDLE_SECONDS = 0.025
VISIT_SECONDS = 0.010
MOST_CALLS = 41
LONG_SECONDS = 0.1  # a call this long warms itself: one is a round
HEAT_SECONDS = 0.4
HOST_SECONDS = 0.05  # the card's work, while its host is timed
SUSTAINED_SECONDS = 0.45
FLUSH_BYTES = 1 << 28
GRAPH_CALLS = 20  # calls in one graph, whose time is that of the calls alone


@dataclass
class Times:
    """Times of one side, in seconds."""

    medians: list[float] = field(default_factory=list)  # of each round
    every: list[float] = field(default_factory=list)
    host: float | None = None  # of the processor, a call; where it was measured

    @property
    def median(self) -> float:
        """The median of the rounds' medians."""
        return statistics.median(self.medians)

    @property
    def p99(self) -> float:
        """The 99th percentile of all calls."""
        ordered = sorted(self.every)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


class Timer:
    """What both timers have: rounds, and who is told which side runs."""

    def __init__(self, rounds: int) -> None:
        """With so many rounds."""
        self.rounds = max(rounds, 1)
        self.tell: Callable[[str], None] = lambda name: None

    def _turns(self, calls: dict[str, Call]) -> Iterator[str]:
        """Each side once a round, in random order."""
        for index in range(self.rounds):
            for name in random.sample(list(calls), len(calls)):
                self.tell(f"{name}, round {index + 1} of {self.rounds}")
                yield name


class CpuTimer(Timer):
    """Wall time on the CPU."""

    def burst(self, calls: dict[str, Call]) -> dict[str, Times]:
        """Each side in random order: an idle gap, a call that wakes its threads, the timed ones."""
        counts = {}
        for name, call in calls.items():
            self.tell(f"{name}, warming up")
            call()
            one = self._seconds(call)
            counts[name] = max(1, min(MOST_CALLS, int(VISIT_SECONDS / max(one, 1e-6)) | 1))
        found = {name: Times() for name in calls}
        for name in self._turns(calls):
            time.sleep(IDLE_SECONDS)
            calls[name]()
            seconds = [self._seconds(calls[name]) for _ in range(counts[name])]
            found[name].medians.append(statistics.median(seconds))
            found[name].every += seconds
        return found

    @staticmethod
    def _seconds(call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak(self, call: Call) -> tuple[Any, int | None]:
        """The result of a call, and the most that NumPy held at once beside what it had.

        None where torch is in use: its memory on the CPU is not told.
        """
        if "torch" in sys.modules:
            return call(), None
        import tracemalloc

        tracemalloc.start()
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result, peak


class GpuTimer(Timer):
    """Times by events on the current stream of torch."""

    def __init__(self, rounds: int) -> None:
        """On torch's current device."""
        super().__init__(rounds)
        torch: Any = import_module("torch")
        self.torch = torch
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._heat: list[Any] = []

    def _round(self, call: Call, count: int) -> list[float]:
        events = [
            tuple(self.torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)
        ]
        for before, after in events:
            self._flush.zero_()
            before.record()
            call()
            after.record()
        self.torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events]

    def burst(self, calls: dict[str, Call]) -> dict[str, Times]:
        """Every side from a cool card: random order, idle gaps, flushed cache."""
        counts = {}
        for name, call in calls.items():
            self.tell(f"{name}, warming up")
            if (one := self._round(call, 1)[0]) > LONG_SECONDS:
                counts[name] = 1
                continue
            one = statistics.median(self._round(call, 3))
            counts[name] = max(3, min(MOST_CALLS, int(VISIT_SECONDS / max(one, 1e-6)) | 1))
        found = {name: Times() for name in calls}
        for name in self._turns(calls):
            time.sleep(IDLE_SECONDS)
            if counts[name] > 1:
                calls[name]()
                calls[name]()
            seconds = self._round(calls[name], counts[name])
            found[name].medians.append(statistics.median(seconds))
            found[name].every += seconds
        return found

    def sustained(self, call: Call, estimate: float) -> Times:
        """Back to back on a card that matrix products have heated, as in training."""
        torch = self.torch
        if not self._heat:
            self._heat = [
                torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(3)
            ]
        a, b, c = self._heat
        start = time.perf_counter()
        while time.perf_counter() - start < HEAT_SECONDS:
            for _ in range(20):
                torch.mm(a, b, out=c)
            torch.cuda.synchronize()
        count = max(2, int(SUSTAINED_SECONDS / max(estimate, 1e-6)))
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(count):
            call()
        after.record()
        torch.cuda.synchronize()
        mean = before.elapsed_time(after) / 1e3 / count
        return Times([mean], [mean])

    def graphed(self, call: Call, count: int = GRAPH_CALLS) -> Call:
        """A replay of so many calls, for calls that are shorter than their launch.

        Raises:
            RuntimeError: the call cannot be captured.
        """
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        replay: Call = graph.replay
        return replay

    def host_seconds(self, call: Call, seconds: float) -> float:
        """Processor time until a call returns that the card has work of so many seconds from."""
        count = max(20, min(200, int(HOST_SECONDS / seconds)))
        for _ in range(20):
            call()
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - start) / count
        self.torch.cuda.synchronize()
        return seconds

    def peak(self, call: Call) -> tuple[Any, int]:
        """The result of a call, and what torch's allocator held at most beside what it had."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = call()
        cuda.synchronize()
        return result, int(cuda.max_memory_allocated() - before)
