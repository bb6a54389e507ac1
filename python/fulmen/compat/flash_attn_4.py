# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 4's plain functions (module flash_attn.cute), with its arguments and returns.

As fulmen.compat.flash_attn has FlashAttention 2's. Both return (o, lse), lse None where neither
return_lse nor a gradient asks for it; learnable_sink is differentiable. Refused by name: qv,
gathered keys, score_mod and mask_mod, block sparsity, a window with one negative side.
num_splits, pack_gqa and scheduler metadata choose nothing here: results do not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention, attention_paged, attention_varlen
from ..errors import ArgumentError, UnsupportedError
from .flash_shared import bound, check_offsets, flash_attn_combine, options_of

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Window = tuple["int | None", "int | None"]


# Nearest calls: functions of CuTe cannot be read from outside of their compiler.
_NEAREST = {
    "score_mod": "; fulmen.compat.flex takes one of PyTorch's, score= of fulmen.attention a text",
    "mask_mod": "; fulmen.compat.flex takes one of PyTorch's, mask= of fulmen.attention a text",
    "block_sparse_tensors": "; fulmen.compat.flex takes a BlockMask",
    "gather_kv_indices": "; fulmen.attention_mla takes indices",
}


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            nearest = _NEAREST.get(name, "")
            raise UnsupportedError(
                f"{name} is given; fulmen.compat.flash_attn_4 takes None there{nearest}"
            )


def _sides(window: Window) -> Window:
    """The sides of a window; both negative: none."""
    sides = [-1 if side is None else side for side in window]
    if max(sides) >= 0 and any(side is not None and side < 0 for side in window):
        raise UnsupportedError(
            f"window_size is {tuple(window)}; a side is 0 or more, or None, and a window before or "
            "behind a row's own key is not read: a boolean mask= of fulmen.attention says it"
        )
    return sides[0], sides[1]


def _with_lse(found: Any, with_lse: bool) -> Any:
    return found if with_lse else (found, None)


def _wants_lse(return_lse: bool, *tensors: Any) -> bool:
    is_recorded = any(x is not None and x.requires_grad for x in tensors)
    return return_lse or (is_recorded and torch.is_grad_enabled())


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Any]:
    """FA4's flash_attn_func: (o, lse), q (batch, q_row, head, dim), lse (batch, head, q_row)."""
    del num_splits, pack_gqa, gather_bwd_recompute_p, gather_bwd_token_chunk
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    options = options_of(
        scale=softmax_scale, causal=causal, window=_sides(window_size), softcap=softcap,
        deterministic=deterministic, sinks=learnable_sink,
    )  # fmt: skip
    with_lse = _wants_lse(return_lse, q, k, v, learnable_sink)
    found = attention(q, k, v, layout="bshd", return_lse=with_lse, **options)
    return _with_lse(found, with_lse)  # type: ignore[no-any-return]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Any]:
    """FA4's flash_attn_varlen_func: (o, lse), q (total_q, head, dim), lse (head, total_q).

    Without offsets q, k and v are (batch, row, head, dim), and seqused_q and seqused_k their
    lengths. With page_table (batch, page) k and v are pages (page, row, kv_head, dim), seqused_k is
    needed, and there is no gradient.
    """
    del num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split
    del disable_scheduler_metadata, gather_bwd_recompute_p, gather_bwd_token_chunk
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    options = options_of(
        scale=softmax_scale, causal=causal, window=_sides(window_size), softcap=softcap,
        deterministic=deterministic, sinks=learnable_sink, q_lengths=seqused_q,
        kv_lengths=seqused_k,
    )  # fmt: skip
    if page_table is not None:
        if seqused_k is None:
            raise ArgumentError("page_table is given without seqused_k, the keys of each request")
        layout = "bshd" if cu_seqlens_q is None else "shd"
        options.update(max_q=bound(max_seqlen_q), max_kv=bound(max_seqlen_k), return_lse=return_lse)
        lengths = options.pop("kv_lengths")
        found = attention_paged(
            q, k, v, page_table, lengths, cu_q=cu_seqlens_q, layout=layout, **options
        )
        return _with_lse(found, return_lse)  # type: ignore[no-any-return]
    with_lse = options["return_lse"] = _wants_lse(return_lse, q, k, v, learnable_sink)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _with_lse(attention(q, k, v, layout="bshd", **options), with_lse)  # type: ignore[no-any-return]
    check_offsets(cu_seqlens_q, cu_seqlens_k)
    options.update(max_q=bound(max_seqlen_q), max_kv=bound(max_seqlen_k))
    found = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return _with_lse(found, with_lse)  # type: ignore[no-any-return]
