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
SHARED_AT_ONCE = 128  # bytes that a block's share is a multiple of
REGISTERS_AT_ONCE = 256  # a warp gets its registers in such pieces
PARTS = 4  # of a multiprocessor, each of which has as many warps and registers


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
    share = -(-shared_bytes // SHARED_AT_ONCE) * SHARED_AT_ONCE + RESERVED_BYTES
    of_warp = max(-(-32 * registers // REGISTERS_AT_ONCE), 1) * REGISTERS_AT_ONCE
    warps = REGISTERS // PARTS // of_warp * PARTS
    return min(by_threads, SHARED_BYTES // share, warps // (threads // 32), BLOCKS)
