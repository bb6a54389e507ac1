# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The derivative of fulmen::merge, in operations of torch: it differentiates again by itself.

With L = lse of the union, T = log(exp(L) + exp(sink)), w = exp(lse of a part - T), delta = do . o:

    do of a part = w do;    dlse of a part = w (do . o of the part - delta) + exp(its lse - L) dlse
    dsinks = - sum over rows of exp(sink - T) delta
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import operators
from .autograd import records


class Merge(torch.autograd.Function):
    """(layout, out_dtype, sinks, *os, *lses) -> (o, lse)."""

    @staticmethod
    def forward(layout: str, out_dtype: Any, sinks: Any, *parts: Tensor) -> Any:
        half = len(parts) // 2
        with operators.below_autograd():
            return operators.merge(list(parts[:half]), list(parts[half:]), sinks, layout, out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout, _, sinks, *parts = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, *output, *parts)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        sinks, o, lse, *parts = ctx.saved_tensors
        os, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        if sinks is None:
            level = lse
        else:
            sink = sinks.to(lse.dtype) if lse.dim() == 1 else sinks.to(lse.dtype)[:, None]
            level = torch.logaddexp(lse, sink.expand_as(lse))
        do = torch.zeros_like(o) if do is None else do
        delta = _along(do, o, lse, ctx.layout)
        dos, dlses = [], []
        for part, part_lse in zip(os, lses):
            share = _share(part_lse, level)
            dos.append((_beside_o(share, ctx.layout).unsqueeze(-1) * do).to(part.dtype))
            found = share * (_along(do, part, lse, ctx.layout) - delta)
            if dlse is not None:
                found = found + _share(part_lse, lse) * dlse
            dlses.append(found.to(part_lse.dtype))
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[2]:
            per_row = -_share(sink.expand_as(lse), level) * delta
            dsinks = per_row.reshape(-1, sinks.shape[0], lse.shape[-1]).sum((0, 2)).to(sinks.dtype)
        return (None, None, dsinks, *dos, *dlses)

    @staticmethod
    def vmap(info: Any, in_dims: Any, layout: str, out_dtype: Any, *tensors: Any) -> Any:
        results = [
            Merge.apply(
                layout,
                out_dtype,
                *(
                    x if dim is None else x.select(dim, index)
                    for x, dim in zip(tensors, in_dims[2:])
                ),
            )
            for index in range(info.batch_size)
        ]
        return tuple(torch.stack(column) for column in zip(*results)), (0, 0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.exp(part - whole.masked_fill(whole == -torch.inf, 0.0))


def _beside_o(x: Tensor, layout: str) -> Tensor:
    """From the axes of lse to those of o without the last."""
    return x.transpose(-1, -2) if layout in ("bshd", "shd") else x


def _along(do: Tensor, o: Tensor, lse: Tensor, layout: str) -> Tensor:
    """rowsum(do * o), with the axes of lse."""
    return _beside_o((do.to(lse.dtype) * o.to(lse.dtype)).sum(-1), layout)


def _merge_autograd(os: Any, lses: Any, sinks: Any, layout: str, out_dtype: Any) -> Any:
    if not records((sinks, *os, *lses)):
        with operators.below_autograd():
            return operators.merge(os, lses, sinks, layout, out_dtype)
    return Merge.apply(layout, out_dtype, sinks, *os, *lses)


operators.library.impl("merge", _merge_autograd, "Autograd")
