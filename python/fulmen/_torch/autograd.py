# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the operators: their Autograd kernels, and the functions under functorch.

    Attention          forward: fulmen::attention    backward: AttentionBackward
    AttentionBackward  forward: fulmen::attention_backward    backward: composed (derivatives.py)

Only the gradients that are asked for are computed. `Dual...` add forward mode: torch wants it left
out where it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import guards, operators
from .batching import mapped_backward, mapped_forward
from .derivatives import backward_cotangents, backward_tangents, forward_tangents
from .kernels import WITH_LSE, WITH_STATS, split
from .settings import DIFFERENTIABLE, NUM_ARRAYS, Arrays, Settings


class AttentionBackward(torch.autograd.Function):
    """(settings, need, do, dlse, o, stats, *arrays) -> (dq, dk, dv, dbias, dsinks)."""

    @staticmethod
    def forward(
        settings: Settings, need: Any, do: Any, dlse: Any, o: Tensor, stats: Tensor, *arrays: Any
    ) -> Any:
        kernel = operators.attention_backward_kernel
        return operators.run_kernel(kernel, do, dlse, o, stats, *arrays, *settings, need)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.settings, ctx.need, do, dlse, o, stats, *arrays = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(do, dlse, o, stats, *arrays)
        ctx.save_for_forward(do, dlse, o, stats, *arrays)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        do, dlse, o, stats, *rest = ctx.saved_tensors
        arrays = Arrays(*rest)
        lse_shape = stats.shape[:-1] if stats.dim() == o.dim() else stats.shape
        found = backward_cotangents(cotangents, do, dlse, o, lse_shape, arrays, ctx.settings)
        outer = [x if given is not None else None for x, given in zip(found, (do, dlse))]
        # o and stats are functions of the leaves: what arrives through them is in `found` already.
        return (None, None, *outer, None, None, *_placed(found[2:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: Settings, need: Any, *args: Any) -> Any:
        return mapped_backward(AttentionBackward, info, in_dims[2:], settings, need, args)


class DualAttentionBackward(AttentionBackward):
    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: Settings, need: Any, *args: Any) -> Any:
        return mapped_backward(DualAttentionBackward, info, in_dims[2:], settings, need, args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        do, dlse, o, stats, *rest = ctx.saved_tensors
        arrays = Arrays(*rest)
        moves = [*tangents[2:4], *(tangents[6 + place] for place in DIFFERENTIABLE)]
        lse_shape = stats.shape[:-1] if stats.dim() == o.dim() else stats.shape
        found = backward_tangents(moves, do, dlse, o, lse_shape, arrays, ctx.settings)
        return tuple(x if wanted else None for x, wanted in zip(found, ctx.need))


class Attention(torch.autograd.Function):
    """(settings, *arrays) -> (o, lse, stats)."""

    @staticmethod
    def forward(settings: Settings, *arrays: Any) -> Any:
        return operators.run_kernel(operators.attention_kernel, *arrays, *settings, WITH_STATS)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.settings, *arrays = inputs
        o, _, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, o, stats)
        ctx.save_for_forward(*arrays)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        return _attention_gradients(AttentionBackward, ctx, do, dlse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: Settings, *arrays: Any) -> Any:
        return mapped_forward(Attention, info, in_dims[1:], settings, Arrays(*arrays))


class DualAttention(Attention):
    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        return _attention_gradients(DualAttentionBackward, ctx, do, dlse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: Settings, *arrays: Any) -> Any:
        return mapped_forward(DualAttention, info, in_dims[1:], settings, Arrays(*arrays))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arrays = Arrays(*ctx.saved_tensors[:NUM_ARRAYS])
        moves = [tangents[1 + place] for place in DIFFERENTIABLE]
        return (*forward_tangents(arrays, ctx.settings, moves), None)


def _attention_gradients(function: Any, ctx: Any, do: Any, dlse: Any) -> Any:
    *arrays, o, stats = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * (1 + NUM_ARRAYS)
    need = [ctx.needs_input_grad[1 + place] for place in DIFFERENTIABLE]
    if guards.is_batched_gradient(do, dlse):
        found = batched_gradients(do, dlse, o, stats, arrays, ctx.settings, need)
        return (None, *_placed(found))
    return (None, *_placed(function.apply(ctx.settings, need, do, dlse, o, stats, *arrays)))


def batched_gradients(
    do: Any, dlse: Any, o: Tensor, stats: Tensor, arrays: Any, settings: Settings, need: Any
) -> Any:
    """The gradients when many do arrive at once (is_grads_batched=True)."""
    with operators.below_autograd():
        found = operators.attention_batched_backward(do, dlse, o, stats, *arrays, *settings, need)
    return [x if wanted else None for x, wanted in zip(found, need)]


def _placed(gradients: Any) -> list[Any]:
    """Gradients at the places of their arrays."""
    full: list[Any] = [None] * NUM_ARRAYS
    for place, x in zip(DIFFERENTIABLE, gradients):
        full[place] = x
    return full


def records(tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attention_autograd(*args: Any) -> Any:
    arrays, settings, (outputs,) = split(args)
    if not records(arrays):
        return operators.run_kernel(operators.attention_kernel, *args)
    o, lse, stats = Attention.apply(settings, *arrays)
    return o, lse if outputs >= WITH_LSE else None, stats if outputs >= WITH_STATS else None


def _attention_backward_autograd(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, settings, (need,) = split(args)
    if not records((do, dlse, *arrays)):
        return operators.run_kernel(operators.attention_backward_kernel, do, dlse, o, stats, *args)
    return AttentionBackward.apply(settings, need, do, dlse, o, stats, *arrays)


def _attention_out_autograd(*args: Any, out: Tensor, lse: Any) -> None:
    arrays, _, _ = split(args)
    if records((*arrays, out, lse)):
        raise RuntimeError("fulmen.attention: out= records no gradient; leave out=None")
    with operators.below_autograd():
        operators.attention_out(*args, out=out, lse=lse)


operators.library.impl("attention", _attention_autograd, "Autograd")
operators.library.impl("attention_backward", _attention_backward_autograd, "Autograd")
operators.library.impl("attention_out", _attention_out_autograd, "Autograd")
