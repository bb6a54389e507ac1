# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen::mla_indexer: an operator that compiles without graph breaks.

    mla_indexer(q, k, weights, topk, k_scale, kv_lengths, page_table, causal, layout) -> indices

Integers have no derivatives: the indices of inputs that require grad do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..array_types import scales
from ..indexing import checked_axes, dtype_of_indices, index_arrays, shape_of_indices
from ..layouts import LAYOUTS
from . import ops

NAMED = ("k_scale", "kv_lengths", "page_table")

ops.library.define(
    "mla_indexer(Tensor q, Tensor k, Tensor weights, SymInt topk, Tensor? k_scale, "
    "Tensor? kv_lengths, Tensor? page_table, bool causal, str layout) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operator = torch.ops.fulmen.mla_indexer.default


def mla_indexer(
    q: Any, k: Any, weights: Any, topk: int, named: dict[str, Any], causal: bool, layout: str
) -> Any:
    """`fulmen.mla_indexer` of tensors."""
    axes = checked_axes(q, k, weights, layout)
    named = {**named, "k_scale": scales(named["k_scale"], q)}
    found = (x if x is None else torch.as_tensor(x, device=q.device) for x in named.values())
    return operator(q, k, weights, topk, *found, causal, axes.name)


def _index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    k_scale: Any,
    kv_lengths: Any,
    page_table: Any,
    causal: bool,
    layout: str,
) -> Any:
    named = dict(zip(NAMED, (k_scale, kv_lengths, page_table)))
    return index_arrays(q, k, weights, topk, named, causal, LAYOUTS[layout])


def _fake(q: Tensor, k: Tensor, weights: Tensor, topk: int, *rest: Any) -> Tensor:
    axes = LAYOUTS[rest[-1]]
    dtype = getattr(torch, dtype_of_indices(k, axes))
    return q.new_empty(shape_of_indices(q, topk, axes), dtype=dtype)


def _autograd(*args: Any) -> Any:
    with ops.below_autograd():
        return operator(*args)


ops.library.impl("mla_indexer", _autograd, "Autograd")
for _key in ("CPU", "CUDA"):
    ops.library.impl("mla_indexer", _index, _key)
torch.library.register_fake("fulmen::mla_indexer", _fake, lib=ops.library)
