# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the generations of FlashAttention share: arguments in fulmen's words, checks of offsets, and
the merge of partial results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import merge
from ..errors import ArgumentError, UnsupportedError


def options_of(causal: bool, window: Any, alibi_slopes: Any = None, **same: Any) -> dict[str, Any]:
    """fulmen's options from FlashAttention's, by fulmen's names; `same` mean the same."""
    left, right = (-1 if side is None else side for side in window)
    return {
        "causal": causal,
        "window": (left, 0 if causal else right),
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        **same,
    }


def scales_of(of_batch: bool, heads: int, **descales: Any) -> dict[str, Any]:
    """q_scale, k_scale, v_scale from the descales, (batch, kv_head), beside arrays of 8 bits.

    Args:
        of_batch: k is (batch, row, kv_head, dim). Packed keys and pages have no axis of the batch:
            there all sequences share the numbers of each head, as an expanded tensor shows.
        heads: of q, which has the number of its key/value head.
        descales: by FlashAttention's names; None: left out.
    """
    found = {}
    for name, given in descales.items():
        if given is None:
            continue
        is_shared = given.shape[0] == 1 or given.stride(0) == 0
        group = heads // given.shape[1] if name == "q_descale" else 1
        x = given.repeat_interleave(group, 1) if group > 1 else given
        if of_batch:
            found[name.replace("descale", "scale")] = x[:, None, :, None]
        elif is_shared:
            found[name.replace("descale", "scale")] = x[0, :, None]
        else:
            raise UnsupportedError(
                f"{name} has numbers of each sequence, and keys that are packed or in pages have "
                "no axis for them: expand one row of (kv_head,) over the batch, or pass a scale a "
                "page or row to fulmen.attention_paged(k_scale=)"
            )
    return found


SAME_WORDS = ("softcap",)  # of score modifiers, in every package; their keywords in fulmen too


def same_words(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords among `given` that another package calls as fulmen does, where they say more
    than None."""
    return {name: given[name] for name in SAME_WORDS if given.get(name) is not None}


def check_offsets(*offsets: Any) -> None:
    """Refuses a longest length in the place of offsets: the order of vLLM's function."""
    for x, side in zip(offsets, "qk"):
        if x is None or isinstance(x, int) or getattr(x, "ndim", 1) == 0:
            raise ArgumentError(
                f"cu_seqlens_{side} is {x!r}; offsets (sequences + 1,) are expected. "
                "FlashAttention's order is q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
                "max_seqlen_k, and vLLM's is another: pass them by name"
            )


def bound(longest: Any) -> Any:
    """An upper bound of lengths; a tensor would have to be read on the host, and is not needed."""
    return None if isinstance(longest, Tensor) else longest


_MOST_PARTS = 32  # of one merge on a GPU


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """FA3's flash_attn_combine: attention over all keys, from that over disjoint parts of them.

    Args:
        out_partial: (part, batch, row, head, dim), float32 or the dtype of o.
        lse_partial: (part, batch, row, head).
        out: (batch, row, head, dim): o is written here.
        out_dtype: dtype of o; None: that of out, or of out_partial.

    Returns:
        (o, lse), lse (batch, row, head); a row that no part saw has o = 0 and lse = -inf.
    """
    parts = list(zip(out_partial, lse_partial.transpose(-1, -2)))
    wide = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    is_merged = False
    while not is_merged:
        is_merged = len(parts) <= _MOST_PARTS
        parts = [
            merge(parts[i : i + _MOST_PARTS], layout="bshd", out_dtype=wide)
            for i in range(0, len(parts), _MOST_PARTS)
        ]
    o, lse = parts[0]
    o = out.copy_(o) if out is not None else o.to(out_dtype or out_partial.dtype)
    return o, lse.transpose(-1, -2)


# Keywords that models hand to every attention function and that say nothing about attention, or
# nothing that is not in the other arguments already. Any other keyword is read, or an error.
WITHOUT_EFFECT = {
    "position_ids": "positions are in q and k already; the mask hook has read packed ones",
    "cache_position": "likewise",
    "cache": "k and v come out of it",
    "past_key_values": "likewise",
    "read_index": "where the cache took k and v from, in continuous batching",
    "write_index": "where it put them",
    "use_cache": "whether it is kept",
    "logits_indices": "of the head behind the layers",
    "logits_processor_args": "likewise",
    "logits_to_keep": "likewise",
    "labels": "of the loss",
    "num_items_in_batch": "of the loss",
    "output_hidden_states": "what the model returns",
    "output_router_logits": "likewise",
    "return_dict": "likewise",
}
