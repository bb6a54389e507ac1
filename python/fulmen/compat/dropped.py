# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""S_dmask of FlashAttention 2: the probabilities of a call with dropout, for tests of dropout.

The one result here whose memory is quadratic, since that is what is asked for. It is made beside
the call, from the same seed and offset: entries that were dropped are negative. Its scale is the
original's: exp(score - m), m being the row maximum over the key's own tile and those behind it,
since the original walks the tiles of a row from the last to the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.geometry import geometry_of
from .._torch.reference import Arrays, Leaves, Meaning, drop_factors, heads_first, scores_of_rows
from ..options import settings_of

# Keys in a tile with dropout, by the largest head dimension: FlashAttention 2.8, its own table.
_TILE_KEYS = ((32, 128), (64, 64), (96, 64), (128, 32))
_TILE_KEYS_WIDER = 64


def draw(q: Tensor) -> Tensor:
    """A seed and an offset from torch's generator."""
    return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=q.device)


def block_keys(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys in a tile of FlashAttention 2 on a GPU; on the CPU those of compute capability 8.0."""
    if is_dropout:
        return next((keys for most, keys in _TILE_KEYS if head_dim <= most), _TILE_KEYS_WIDER)
    if 96 < head_dim <= 128 and torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 32 if major == 8 and minor > 0 and not is_causal else 64
    return 128 if head_dim <= 64 else 64


def dropped_probabilities(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """S_dmask (batch, head, q_row, kv_row) in the dtype of q, 0 where hidden.

    Args:
        q, k: of the call.
        options: of the call, `rng` a tensor among them; packed sequences are padded.
    """
    words = {name: options[name] for name in ("causal", "window", "scale", "softcap")}
    settings = settings_of(tuple(words.items()))
    meaning = Meaning(settings.fields(), "bhsd", False, None)
    lengths = {"kv_lengths": options.get("kv_lengths")}
    if options.get("cu_q") is not None:
        q, lengths["q_lengths"] = _padded(q, options["cu_q"])
        k, own = _padded(k, options["cu_kv"])
        used = lengths["kv_lengths"]
        lengths["kv_lengths"] = own if used is None else used.minimum(own)
    q, k = (heads_first(x, "bshd") for x in (q, k))
    arrays = Arrays(q, k, k, alibi_slopes=options["alibi_slopes"], **lengths)
    batch, heads, rows, dim = q.shape
    where = geometry_of(arrays, meaning, batch, rows, k.shape[2], slice(0, rows))
    S = scores_of_rows(Leaves(q, k, None), q, meaning, arrays, where)
    tile = block_keys(q.device, dim, True, options["causal"])
    maxima = torch.stack([x.amax(-1) for x in S.split(tile, -1)], -1)
    running = maxima.flip(-1).cummax(-1).values.flip(-1)
    running = running.masked_fill(running == -torch.inf, 0.0).repeat_interleave(tile, -1)
    P = torch.exp(S - running[..., : S.shape[-1]])
    kept = drop_factors(options["dropout_p"], options["rng"], where, heads) > 0
    return torch.where(kept, P, -P).to(q.dtype)


def _padded(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, longest, head, dim) and lengths, from packed rows."""
    starts = offsets[:-1].long()
    lengths = offsets[1:].long() - starts
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = starts[:, None] + torch.arange(longest, device=x.device)
    return x[rows.clamp(max=max(x.shape[0] - 1, 0))], lengths
