# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch, for inputs (batch, head, row, dim): what the tests compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fulmen
from fulmen._torch import ops
from fulmen.options import settings_of


def reference(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """(o, lse) by the equations of docs/en/concepts/attention.md, in the dtype of q.

    keep: what the probabilities are multiplied by, (batch, head, q_row, kv_row).
    """
    keep = options.pop("keep", None)
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)
    slopes = options.pop("alibi_slopes", None)
    scale, softcap = options.pop("scale", None), options.pop("softcap", 0.0)
    options = {key: x.cpu().numpy() if torch.is_tensor(x) else x for key, x in options.items()}
    visible = torch.from_numpy(np.array(fulmen.dense_mask(q.shape[2], k.shape[2], **options)))
    visible = visible.to(q.device).broadcast_to(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    if slopes is not None:
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        j = torch.arange(k.shape[2], device=q.device)
        s = s - (slopes[:, None, None] * (i + k.shape[2] - q.shape[2] - j).abs()).to(s.dtype)
    s = s.masked_fill(~visible, -torch.inf)
    is_empty = ~visible.any(-1)
    lse = torch.logsumexp(s.masked_fill(is_empty[..., None], 0.0), -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    p = torch.exp(s - total[..., None]).masked_fill(is_empty[..., None], 0.0)
    p = p if keep is None else p * keep
    return p @ v, lse.masked_fill(is_empty, -torch.inf)


def inputs(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_rows: int = 7,
    kv_rows: int = 9,
    dim: int = 8,
    dim_v: int = 8,
    dtype: Any = None,
    grad: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """Random q, k, v."""
    dtype = dtype or torch.float64
    shapes = ((heads, q_rows, dim), (kv_heads, kv_rows, dim), (kv_heads, kv_rows, dim_v))
    return [
        torch.randn(batch, *shape, dtype=dtype, requires_grad=grad, device=device)
        for shape in shapes
    ]


def op_settings(out_dtype: Any = None, **options: Any) -> Any:
    """Settings of an operator: options by the names of the schema, and the layout."""
    if options.get("dropout_p"):
        options["rng"] = (0, 0)  # the operators take a tensor
    return ops.op_settings(settings_of(tuple(options.items())), out_dtype)
