# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Exercise 6.2: how many blocks there are, and how well they fill a card."""


def blocks(batch: int, heads: int, rows: int, rows_of_block: int) -> int:
    """Blocks of FlashAttention-2; the last one of a head may have fewer rows."""
    raise NotImplementedError


def filled(num_blocks: int, multiprocessors: int, blocks_of_multiprocessor: int) -> float:
    """The part of the card that has work, on average over the waves of equally long blocks.

    A wave is as many blocks as the card holds; the next one begins when it has ended.
    """
    raise NotImplementedError
