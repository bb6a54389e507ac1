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
    Owed("u08", "flash-attention#1745", "inference", "NaN in unused slots of a key/value cache"),
    Owed("u10", "flashinfer#4452", "inference", "the same through pages"),
    Owed("u33", "pytorch#186142", "hopper backward", "scratch sized by lengths, not by dim"),
    Owed("u62", "flash-attention#2260", "tensor cores", "batch 8300 with D 128 on a GPU"),
    Owed("u63", "flash-attention#1311", "tensor cores", "backward of (28800, 15, 16, 72)"),
    Owed("u64", "flash-attention#2214", "tensor cores", "forward of (1600, 16, 729, 72)"),
    Owed("u65", "flash-attention#2611", "hopper backward", "64-bit offsets in device code"),
    Owed("u66", "flash-attention#772", "inference", "append into batch slots 2^30 elements apart"),
    Owed("u67", "flash-attention#47", "hopper forward", "350,000 keys, batch 32 against 1"),
    Owed("u68", "pytorch#147585", "tensor cores", "masks of 2^31 elements and more"),
    Owed("u69", "pytorch#107959", "tensor cores", "a bias of 2^31 elements"),
    Owed("u70", "pytorch#162588", "tensor cores", "long sequences with a mask"),
    Owed("u72", "pytorch#146704", "gpu run time", "grids beyond 65,535"),
    Owed("u73", "flashinfer#320", "inference", "last_page_len above page_size is an error"),
    Owed("u78", "flash-attention#2563", "block masks", "the same mask as lists of blocks"),
    Owed("u81", "pytorch#182593", "inference", "the same bits under a permutation of pages"),
    Owed("u82", "flashinfer#725", "inference", "two equal requests on partial pages"),
    Owed("u83", "flashinfer#760", "inference", "partial last page, 32 heads, D 128"),
    Owed("u89", "pytorch#193893", "hopper forward", "few kv_heads on a GPU"),
    Owed("u97", "flash-attention#638", "inference", "append to a full cache is an error"),
    Owed("u99", "flash-attention#778", "inference", "any number of splits with appended keys"),
    Owed("u100", "torchtitan#3235", "inference", "hundreds of decode steps with growing context"),
    Owed("u101", "flash-attention#1417", "inference", "capacity of a cache does not matter"),
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
