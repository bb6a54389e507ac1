# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Public bug reports that no case covers whole yet, and what each is waiting for.

The other reports have cases in bugs_rows, bugs_numbers and bugs_masks, named by their number, or,
where PyTorch is what they are about, tests of tests/torch. Some stand in both: the CPU part has a
case, the rest waits. A test holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple


class Owed(NamedTuple):
    """One report that waits."""

    number: str
    report: str
    waits_for: str
    what: str


OWED = (
    Owed("u33", "pytorch#186142", "hopper backward", "scratch sized by lengths, not by dim"),
    Owed("u62", "flash-attention#2260", "tensor cores", "batch 8300 with D 128 on a GPU"),
    Owed("u63", "flash-attention#1311", "tensor cores", "backward of (28800, 15, 16, 72)"),
    Owed("u64", "flash-attention#2214", "tensor cores", "forward of (1600, 16, 729, 72)"),
    Owed("u65", "flash-attention#2611", "hopper backward", "64-bit offsets in device code"),
    Owed("u67", "flash-attention#47", "hopper forward", "350,000 keys, batch 32 against 1"),
    Owed("u68", "pytorch#147585", "tensor cores", "masks of 2^31 elements and more"),
    Owed("u69", "pytorch#107959", "tensor cores", "a bias of 2^31 elements"),
    Owed("u70", "pytorch#162588", "tensor cores", "long sequences with a mask"),
    Owed("u72", "pytorch#146704", "gpu run time", "grids beyond 65,535"),
    Owed("u78", "flash-attention#2563", "block masks", "the same mask as lists of blocks"),
    Owed("u89", "pytorch#193893", "hopper forward", "few kv_heads on a GPU"),
    Owed("u116", "flash-attention#1711", "fp8", "fp8 forward then backward"),
)

# Every report of the list that docs and issues refer to.
REPORTED = tuple(
    f"u{n:02d}"
    for n in (
        1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 33,
        34, 35, 37, 38, 39, 40, 42, 43, 45, 46, 47, 48, 49, 51, 52, 53, 55, 57, 58, 59, 60, 62, 63,
        64, 65, 66, 67, 68, 69, 70, 72, 73, 74, 75, 76, 77, 78, 81, 82, 83, 84, 85, 88, 89, 90, 91,
        92, 93, 94, 95, 97, 99, 100, 101, 103, 104, 105, 106, 107, 108, 110, 111, 113, 114, 116,
    )
)  # fmt: skip
