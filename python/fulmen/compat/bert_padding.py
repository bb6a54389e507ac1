# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""flash_attn.bert_padding: between padded batches and packed rows. Differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]: rows of the first axis."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows at their places among `first_axis_dim`, zeros elsewhere."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    return out.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows that a mask keeps.

    Args:
        hidden_states: (batch, row, ...).
        attention_mask: (batch, row), 1 for rows that are used.
        unused_mask: (batch, row), 1 for rows that are kept beside these, and not used.

    Returns:
        (rows (total, ...), their indices in (batch * row), cu_seqlens (batch + 1) int32, the
        longest length, seqused (batch) int32).
    """
    used = attention_mask
    kept = used if unused_mask is None else used + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    longest: Any = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, used.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the rows of batch entries that hold several sequences each, one after the other.

    Args:
        hidden_states: (batch, row, ...).
        attention_mask_in_length: (batch, row) integers: the lengths of an entry's sequences among
            zeros; their sum is how many of its first rows are used.

    Returns:
        (rows (total, ...), their indices in (batch * row), cu_seqlens (sequences + 1) int32, the
        longest length).
    """
    lengths = attention_mask_in_length
    row = torch.arange(lengths.shape[-1], device=lengths.device)
    used = row < lengths.sum(-1, keepdim=True)
    rows, indices, *_ = unpad_input(hidden_states, used)
    each = lengths[lengths != 0]
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(each, 0, dtype=torch.int32), (1, 0))
    longest: Any = int(each.max()) if each.numel() else 0
    return rows, indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: (batch, seqlen, ...), zeros where no row was kept."""
    out = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return out.unflatten(0, (batch, seqlen))
