# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a multiprocessor has room for, and what cards do in a second.

The limits are those of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities");
the rates are NVIDIA's data sheets': dense 16-bit products with float32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

THREADS, BLOCKS, REGISTERS, SHARED_BYTES = 2048, 32, 65536, 233472
RESERVED_BYTES = 1024  # of shared memory, by the system, for each block
REGISTERS_AT_ONCE = 256  # a warp gets its registers in such pieces


class Card(NamedTuple):
    """A card by its data sheet."""

    name: str
    multiprocessors: int
    bytes_per_second: float
    flops: float  # of tensor cores
    float32_flops: float


CARDS = (
    Card("RTX 4090", 128, 1.008e12, 165e12, 82.6e12),
    Card("A100", 108, 2.039e12, 312e12, 19.5e12),
    Card("H100", 132, 3.35e12, 989e12, 67e12),
    Card("H200", 132, 4.8e12, 989e12, 67e12),
)
H200 = CARDS[3]


def occupancy(threads: int, shared_bytes: int, registers: int = 0) -> int:
    """Blocks that are on a multiprocessor at once.

    Args:
        threads: of a block.
        shared_bytes: of a block, as the launch asks for them.
        registers: of a thread; 0 where they are not known, and then they bound nothing.
    """
    by_threads = THREADS // threads
    by_shared = SHARED_BYTES // (shared_bytes + RESERVED_BYTES)
    of_warp = -(-32 * registers // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // (of_warp * threads // 32) if registers else BLOCKS
    return min(by_threads, by_shared, by_registers, BLOCKS)
