# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Solution of 6.2."""

import math


def blocks(batch: int, heads: int, rows: int, rows_of_block: int) -> int:
    """Rows are cut within a head."""
    return batch * heads * math.ceil(rows / rows_of_block)


def filled(num_blocks: int, multiprocessors: int, blocks_of_multiprocessor: int) -> float:
    """Blocks over the places of whole waves."""
    places = multiprocessors * blocks_of_multiprocessor
    return num_blocks / (places * math.ceil(num_blocks / places))
