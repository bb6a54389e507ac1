# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a processor does at most when nothing else stands in the way, on as many threads as a call.

Loops of the instruction set in use, which the library has (fulmen_experimental.h): multiply-adds of
float32 and products of bfloat16 in registers, and reads of memory in order. They are timed among
the sides of a cell, in the same random order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import fulmen
from fulmen._library import library

MULTIPLY_ADDS, PAIR_PRODUCTS, READ = 1, 2, 3  # fulmen_cpu_loop
SECONDS = 0.004  # about what a call takes
TRIED_STEPS = 2000
NOTHING = np.empty(0, np.uint8)


class CpuPeak:
    """A call of one loop, and what it does: floating-point operations, or bytes."""

    def __init__(self, loop: int, steps: int, buffer: np.ndarray = NOTHING) -> None:
        """So many steps of a loop, the last over a buffer.

        Raises:
            UnsupportedError: the instruction set has no such loop.
        """
        self.call: Callable[[], int] = lambda: library().cpu_run_loop(loop, steps, buffer)
        self.amount = float(self.call())


def arithmetic(dtype: str) -> CpuPeak:
    """The products that attention of a dtype is made of: of bfloat16 as it is, where there are any.

    float16 is widened, and so is bfloat16 elsewhere. Takes about SECONDS.
    """
    loop = PAIR_PRODUCTS if dtype == "bfloat16" else MULTIPLY_ADDS
    try:
        return _timed(loop)
    except fulmen.UnsupportedError:
        return _timed(MULTIPLY_ADDS)


def _timed(loop: int) -> CpuPeak:
    import time

    tried = CpuPeak(loop, TRIED_STEPS)
    start = time.perf_counter()
    tried.call()
    seconds = max(time.perf_counter() - start, 1e-6)
    return CpuPeak(loop, max(TRIED_STEPS, int(TRIED_STEPS * SECONDS / seconds)))


def reading(count: int) -> CpuPeak:
    """Reads about count bytes, which no cache holds where a cell's own would not be held either."""
    return CpuPeak(READ, 1, np.full(count, 1, np.uint8))
