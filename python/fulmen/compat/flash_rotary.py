# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers.rotary: rotary embeddings under FlashAttention's names.

(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin), of halves of the first rotary_dim numbers or of
neighbours (interleaved); computed in float32, rounded once. Su et al., RoFormer: Enhanced
Transformer with Rotary Position Embedding (2021), section 3.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rotary
from ..errors import ArgumentError, UnsupportedError

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


class Rows(NamedTuple):
    """Which request each row belongs to, and its number there."""

    request: Tensor  # (batch, row) or (total,)
    number: Tensor  # (row,) or (total,)


def rows_of(x: Tensor, offsets: Any) -> Rows:
    """Of (batch, row, ...), or of packed rows; those past the last offset belong to the last."""
    batch = x.shape[0] if offsets is None else offsets.shape[0] - 1
    if offsets is None:
        requests = torch.arange(batch, device=x.device)
        return Rows(
            requests[:, None].expand(x.shape[:2]), torch.arange(x.shape[1], device=x.device)
        )
    row = torch.arange(x.shape[0], device=x.device)
    request = torch.bucketize(row, offsets[1:].long(), right=True).clamp(max=max(batch - 1, 0))
    return Rows(request, row - offsets.long()[request])


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(x0, x1) -> (-x1, x0), of halves of the last axis, or of neighbours."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """`fulmen.rotary` of (batch, row, head, dim), or of packed (row, head, dim)."""
    layout = "bshd" if x.dim() == 4 else "shd"
    found: Tensor = rotary(x, position, cos, sin, interleaved=interleaved, layout=layout)
    return found


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """FlashAttention's apply_rotary_emb; differentiable where it does not write into x.

    Args:
        x: (batch, row, head, dim), or with cu_seqlens (total, head, dim).
        cos, sin: (position, rotary_dim / 2).
        interleaved: neighbours are pairs, else halves.
        inplace: write into x, and return it.
        seqlen_offsets: where the first row of each sequence stands: a number, or (batch,).
        cu_seqlens: (batch + 1,) offsets of packed sequences.
        max_seqlen: not needed.
    """
    del max_seqlen
    request, number = rows_of(x, cu_seqlens)
    offsets = seqlen_offsets.long()[request] if isinstance(seqlen_offsets, Tensor) else (
        seqlen_offsets + torch.zeros_like(request)
    )  # fmt: skip
    found = rotated(x, cos, sin, offsets + number, interleaved)
    if not inplace:
        return found
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("x requires grad and inplace is True; inplace=False has a gradient")
    return x.copy_(found)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """The same at positions 0, 1, ...; cos and sin (row, rotary_dim / 2)."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """q and k of qkv rotated: (batch, row, 3, head, dim), or (batch, row, heads of all, dim).

    A new tensor where qkv requires grad, else qkv itself.
    """
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise ArgumentError("qkv has four axes and num_heads_q is missing: the heads of q")
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], 2)
    q = apply_rotary_emb(q, cos, sin, interleaved, False, seqlen_offsets)
    tables = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    k = apply_rotary_emb(k, *tables, interleaved, False, seqlen_offsets)
    made = torch.stack((q, k, v), 2) if qkv.dim() == 5 else torch.cat((q, k, v), 2)
    return made if qkv.requires_grad and torch.is_grad_enabled() else qkv.copy_(made)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Any = 0
) -> Tensor:
    """k of kv (batch, row, 2, head, dim) rotated; a new tensor where kv requires grad, else kv."""
    k = apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, False, seqlen_offsets)
    made = torch.stack((k, kv[:, :, 1]), 2)
    return made if kv.requires_grad and torch.is_grad_enabled() else kv.copy_(made)


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """FlashAttention's RotaryEmbedding: tables that grow with the positions that are asked for."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        """Of the first `dim` numbers of a head.

        Raises:
            fulmen.UnsupportedError: scale_base (XPos), whose keys and queries have other tables.
        """
        super().__init__()
        if scale_base is not None:
            raise UnsupportedError("scale_base (XPos) is given; fulmen takes None there")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / self.base**exponent, persistent=False)
        self._cos_cached: Any = None
        self._sin_cached: Any = None

    def _tables(self, rows: int, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
        cos = self._cos_cached
        if cos is None or len(cos) < rows or cos.device != device or cos.dtype != dtype:
            place = torch.arange(rows, device=device, dtype=torch.float32)
            angle = torch.outer(place, self.inv_freq.to(device))
            self._cos_cached, self._sin_cached = angle.cos().to(dtype), angle.sin().to(dtype)
        return self._cos_cached, self._sin_cached

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Qkv rotated; with kv (batch, row, 2, head, dim), q = qkv and kv rotated.

        Args:
            qkv: (batch, row, 3, head, dim), (batch, row, heads of all, dim), or q beside kv.
            kv: keys and values.
            seqlen_offset: where the first row stands; a tensor (batch,) needs max_seqlen.
            max_seqlen: the most positions.
            num_heads_q: of a qkv with four axes.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise ArgumentError("seqlen_offset is a tensor and max_seqlen is missing")
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin = self._tables(max_seqlen, qkv.device, qkv.dtype)
        how = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=num_heads_q, **how)
        q = apply_rotary_emb(qkv, cos, sin, **how)
        return q, apply_rotary_emb_kv_(kv, cos, sin, **how)
