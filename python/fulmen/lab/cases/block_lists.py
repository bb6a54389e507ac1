# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks: drawn for a case, and what they show of one head."""

from __future__ import annotations

from typing import Any

import numpy as np


def draw(rng: np.random.Generator, case: Any, size: tuple[int, int], axes: str) -> Any:
    """Half of the blocks, in any order, some twice, -1 between them.

    Args:
        rng: where they are drawn from.
        case: whose batch, heads and rows they are for; packed rows may all be of one sequence.
        size: query rows and keys of a block.
        axes: "1" or "b", then "1", "k" or "h": what the first two axes are.
    """
    batch = case.batch if axes[0] == "b" else 1
    heads = {"1": 1, "k": case.kv_heads, "h": case.heads}[axes[1]]
    num_rows, num_keys = -(-case.q_rows // size[0]), -(-case.kv_rows // size[1])
    shape = (batch, heads, num_rows, num_keys // 2 + 1)
    lists = rng.integers(-1, max(num_keys, 1), shape).astype(rng.choice(["int32", "int64"]))
    lists[rng.random(shape) < 0.25] = -1
    return lists


def shows(mask: Any, batch: int, head: int, heads: int, i: Any, j: Any) -> Any:
    """Whether masks.blocks names the block of each pair of one head; i, j broadcast."""
    lists: Any = np.asarray(mask.lists)
    lists = lists.reshape((1,) * (4 - lists.ndim) + lists.shape)
    lists = lists[batch if len(lists) > 1 else 0, head * lists.shape[1] // heads]
    row, key = i // mask.size[0], j // mask.size[1]
    named = (lists[:, :, None] == np.arange(max(int(key.max(initial=0)), 0) + 1)).any(1)
    return np.asarray((key >= 0) & named[row, np.maximum(key, 0)])
