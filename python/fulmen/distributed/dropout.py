# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Dropout of a whole sequence: its pattern is that of positions, so calls say them by segments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .parts import Segment

DROPOUT = ("dropout_p", "rng")
_KEPT = ("causal", "window", "alibi_slopes", *DROPOUT)


def dropout_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a call with segments takes as they are; without dropout none.

    Raises:
        ArgumentError: dropout without the numbers that it draws by.
    """
    if not options.get("dropout_p"):
        return {}
    if options.get("rng") is None:
        raise ArgumentError(
            "dropout_p is given to context parallelism without rng; rng=(seed, offset), or an "
            "int64 tensor of both, the same on every rank, says which entries are dropped"
        )
    return {name: options[name] for name in _KEPT if options.get(name) is not None}


@lru_cache(maxsize=32)
def segments_of(segments: tuple[Segment, ...], device: Any) -> Tensor:
    """(segment, 3) int32: first row in memory, rows, position of the first."""
    at, found = 0, []
    for first, rows in segments:
        found.append((at, rows, first))
        at += rows
    return torch.tensor(found or [(0, 0, 0)], dtype=torch.int32).to(device)
