# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a chapter says while it runs: results against float64, counters beside predictions, plots.

A chapter gets a Lesson. It launches its kernels through `run`, which on the emulator means twice,
once under the checker and once with counters, and on a GPU once and then against the clock. It says
what it predicted by `compare`. Everything wrong is remembered: `fulmen learn` ends with 1, and an
exercise is not solved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fulmen.cli.output import Output, seconds_text
from fulmen.lab.cases.error_rule import Fair, Verdict, consult, judge, judge_rows
from fulmen.lab.cases.visible import Options, Problem

from . import cards
from .device import Array, Buffer, Device, Emulator, Kernel

BAR = 40  # characters of the longest bar of a plot
EPSILON = float(np.finfo(np.float32).eps)


class Counters:
    """What the kernels of a run did, as the emulator counted it; nothing, where a GPU ran them."""

    def __init__(self, found: dict[str, Any]) -> None:
        """Of Emulator.counted; empty for a GPU."""
        self._found = found

    def loaded(self, *arrays: str) -> int:
        """Bytes that threads loaded from arrays in global memory; from all where none is named."""
        return self._traffic("loaded_bytes", arrays)

    def stored(self, *arrays: str) -> int:
        """Bytes stored, likewise."""
        return self._traffic("stored_bytes", arrays)

    def sectors(self, *arrays: str) -> int:
        """Pieces of 32 bytes that warps asked memory for, loads and stores."""
        return self._traffic("loaded_sectors", arrays) + self._traffic("stored_sectors", arrays)

    def moved(self, *arrays: str) -> int:
        """Bytes loaded and stored."""
        return self.loaded(*arrays) + self.stored(*arrays)

    def _traffic(self, what: str, arrays: Sequence[str]) -> int:
        found = self._found.get("arrays", {})
        return sum(int(found.get(name, {}).get(what, 0)) for name in arrays or found)

    @property
    def flops(self) -> int:
        """Two for each multiply-add, on the ordinary units and on tensor cores."""
        return 2 * int(self._found.get("multiply_adds", 0)) + int(
            self._found.get("product_flops", 0)
        )

    @property
    def products(self) -> int:
        """Instructions of tensor cores, of warps or warpgroups."""
        return int(self._found.get("products", 0))

    @property
    def exponentials(self) -> int:
        """Calls of exp2."""
        return int(self._found.get("exponentials", 0))

    @property
    def conflicts(self) -> int:
        """Wavefronts of shared memory beyond those that no layout saves."""
        return sum(int(site["conflicts"]) for site in self._found.get("shared", ()))

    @property
    def barrier_waits(self) -> int:
        """Threads that came to a barrier, each time they did."""
        return int(self._found.get("barrier_waits", 0))

    @property
    def shuffles(self) -> int:
        """Of threads."""
        return int(self._found.get("shuffles", 0))

    @property
    def wavefronts(self) -> int:
        """Times that shared memory was busy with an access of a warp."""
        return sum(int(site["wavefronts"]) for site in self._found.get("shared", ()))


class Lesson:
    """One run of a chapter, or of the test of an exercise, on one device."""

    def __init__(self, device: Device, output: Output, quiet: bool = False) -> None:
        """`quiet`: nothing is printed, for exercises, which end in one sentence."""
        self.device, self.output, self._quiet = device, output, quiet
        self.wrong: list[str] = []  # a sentence each
        self.lines: list[dict[str, Any]] = []  # for --json
        self._rng = np.random.default_rng(0)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels take their real time here, and are not counted."""
        return not isinstance(self.device, Emulator)

    def draw(self, *shape: int) -> Array:
        """Float32 numbers from the standard normal distribution, the same in every run."""
        return self._rng.standard_normal(shape).astype(np.float32)

    def say(self, text: str = "") -> None:
        """A line of text."""
        if not self._quiet:
            self.output.line(text)

    # Running

    def run(self, call: Callable[[], None], clear: Sequence[Buffer] = ()) -> Counters:
        """Runs the launches of `call`; `clear`: arrays that begin anew before each run."""

        def anew() -> None:
            for buffer in clear:
                buffer.reset()

        anew()
        call()
        self.device.synchronize()
        if not isinstance(self.device, Emulator):
            return Counters({})
        anew()
        return Counters(self.device.counted(call))

    def time(self, what: str, call: Callable[[], None], flops: float, num_bytes: float) -> None:
        """On a GPU, the time of `call` beside what its operations and bytes come to a second."""
        if not self.on_gpu:
            return
        seconds = self.device.seconds(call)
        self.lines.append({"what": what, "seconds": seconds, "flops": flops, "bytes": num_bytes})
        rate = f", {flops / seconds / 1e12:.3g} TFLOP/s" if flops else ""
        moved = f", {num_bytes / seconds / 1e9:.4g} GB/s"
        self.say(f"  {what}: {seconds_text(seconds)}{rate}{moved}")

    # What should be

    def compare(self, what: str, counted: int, predicted: int) -> None:
        """A counter beside its prediction, which must be equal; alone where nothing counts."""
        self._compare(what, counted if self.device.counts else None, predicted)

    def _compare(self, what: str, counted: int | None, predicted: int) -> None:
        agree = counted is None or counted == predicted
        self.lines.append({"what": what, "counted": counted, "predicted": predicted})
        shown = "-" if counted is None else f"{counted:,}"
        self.say(f"  {what:<44}{shown:>16}{predicted:>16,}{'' if agree else '   differs'}")
        if not agree:
            self.wrong.append(f"{what}: {shown} counted, {predicted:,} expected")

    def occupancy(self, kernel: Kernel, threads: int, shared_bytes: int) -> None:
        """Blocks that an H200's multiprocessor has room for: what the driver says, by the rule."""
        is_like = self.on_gpu and self.device.capability == 90
        counted = kernel.blocks_per_multiprocessor(threads, shared_bytes) if is_like else None
        room = cards.occupancy(threads, shared_bytes, kernel.registers() if is_like else 0)
        self._compare("blocks that a multiprocessor has room for", counted, room)

    def head(self, title: str) -> None:
        """The head of the lines that follow."""
        self.say()
        self.say(f"{title:<46}{'counted':>16}{'predicted':>16}")

    def require(self, condition: bool, sentence: str) -> None:
        """Remembers the sentence unless the condition holds."""
        if not condition:
            self.wrong.append(sentence)

    def check_attention(
        self, found: dict[str, Array], q: Array, k: Array, v: Array, **options: Any
    ) -> None:
        """Judges o, lse, dq, dk, dv by the project's error rule, row by row.

        Args:
            found: the results by these names; lse without its last axis.
            q: (row, dim) or (batch, head, row, dim), float32 or float16
            k: (key, dim) or with the same axes before
            v: (key, dim) likewise
            **options: causal and the like; do where gradients are judged.
        """
        do = options.pop("do", None)
        arrays = [_with_heads(x, 2) for x in (q, k, v)]
        problem = Problem(
            arrays[0], arrays[1], arrays[2], Options(**options),
            do=None if do is None else _with_heads(do, 2),
        )  # fmt: skip
        oracle = consult(problem, q.dtype.name)
        for name, got in found.items():
            self._judged(name, judge(name, _with_heads(got, 1 if name == "lse" else 2), oracle))

    def check_product(self, name: str, got: Array, a: Array, b: Array) -> None:
        """Judges a matrix product, got = a b, by the same rule."""
        wide = [x.astype(np.float64) for x in (a, b)]
        truth = wide[0] @ wide[1]
        plain = (a @ b).astype(np.float64)
        terms = abs(wide[0]) @ abs(wide[1])
        none = np.zeros(len(truth))
        fair = Fair(truth, plain, terms.max(axis=1), none, none, EPSILON, 0)
        self._judged(name, judge_rows(got, fair))

    def check_within(self, name: str, got: Array, truth: Array, allowed: Array) -> None:
        """Judges number by number: how far each may be from the truth is given."""
        ratio = abs(got.astype(np.float64) - truth) / allowed
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        at = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
        message = f"{float(got[at]):.6g} at {at}, where {float(truth[at]):.6g} is right"
        self._judged(name, Verdict(bool(ratio[at] <= 1), float(ratio[at]), at, message))

    def check_equal(self, name: str, got: Array, expected: Array) -> None:
        """Judges integers, and copies: the same bits."""
        differs = np.argwhere(np.atleast_1d(got != expected))
        at = tuple(int(n) for n in differs[0]) if len(differs) else ()
        message = f"{len(differs)} numbers differ, first at {at}" if len(differs) else "equal"
        self._judged(name, Verdict(not len(differs), 0.0, at, message))

    def _judged(self, name: str, verdict: Verdict) -> None:
        self.lines.append({"what": name, "passed": verdict.passed, "of_allowed": verdict.ratio})
        if verdict.passed:
            self.say(
                f"{name} is right: its largest error is {verdict.ratio:.2f} of what is allowed"
            )
        else:
            self.say(f"{name} is wrong: {verdict.message}")
            self.wrong.append(f"{name} is wrong: {verdict.message}")

    # Plots

    def plot(self, title: str, points: Sequence[tuple[str, float]], logarithmic: bool = False,
             ) -> None:  # fmt: skip
        """Bars, one a point; `logarithmic`: a character is the same factor everywhere."""
        self.say()
        self.say(title)
        largest = max(value for _, value in points)
        smallest = min(value for _, value in points)
        width = max(len(label) for label, _ in points)
        for label, value in points:
            part = value / largest
            if logarithmic and largest > smallest:
                part = 0.1 + 0.9 * math.log(value / smallest) / math.log(largest / smallest)
            self.say(f"  {label:>{width}} {'#' * max(round(BAR * part), 1):<{BAR}} {value:,.6g}")


def _with_heads(x: Array, axes: int) -> Array:
    """With a batch entry and a head before its last axes, if it has those alone."""
    return x[None, None] if x.ndim == axes else x
