# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives: autograd functions for eager mode and functorch, Autograd kernels of the ops.

    Attention          forward: fulmen::attention    backward: AttentionBackward
    AttentionBackward  forward: fulmen::attention_backward    backward: composed (derivatives.py)
    EagerAttention     the library itself, both ways, in eager mode without modes or transforms
    Merge              fulmen::merge, whose derivative is made of operations of torch

Only the gradients that are asked for are computed. `Dual...` add forward mode: torch wants it left
out where it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layouts import LAYOUTS
from ..merging import merge_arrays
from ..options import Settings, names_of
from . import guards, ops
from .derivatives import (
    backward_cotangents,
    backward_tangents,
    forward_tangents,
    mapped_backward,
    mapped_forward,
    refuse_expression,
)
from .ops import (
    DIFFERENTIABLE,
    NUM_ARRAYS,
    STATS_ONLY,
    WITH_LSE,
    WITH_STATS,
    Arrays,
    OpSettings,
    op_settings,
    run_backward,
    run_forward,
    split,
)
from .reference import Meaning, accumulator


def _meaning(settings: OpSettings) -> Meaning:
    """Settings of an operator, to be read by name."""
    own = ops.settings_of(settings)
    options = own.fields()
    refuse_expression(settings)
    is_top_left = names_of("alignment")[options.alignment] == "top_left"
    return Meaning(options, own.layout.name, is_top_left, settings.out_dtype)


class AttentionBackward(torch.autograd.Function):
    """(settings, need, do, dlse, o, stats, *arrays) -> (dq, dk, dv, dbias, dsinks)."""

    @staticmethod
    def forward(
        settings: OpSettings, need: Any, do: Any, dlse: Any, o: Tensor, stats: Tensor, *arrays: Any
    ) -> Any:
        return ops.run_backward_kernel(do, dlse, o, stats, *arrays, *settings, need)

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
        found = backward_cotangents(
            cotangents, do, dlse, o, lse_shape, arrays, _meaning(ctx.settings)
        )
        outer = [x if given is not None else None for x, given in zip(found, (do, dlse))]
        # o and stats are functions of the leaves: what arrives through them is in `found` already.
        return (None, None, *outer, None, None, *_placed(found[2:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: OpSettings, need: Any, *args: Any) -> Any:
        return _mapped_backward(AttentionBackward, info, in_dims[2:], settings, need, args)


class DualAttentionBackward(AttentionBackward):
    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: OpSettings, need: Any, *args: Any) -> Any:
        return _mapped_backward(DualAttentionBackward, info, in_dims[2:], settings, need, args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        do, dlse, o, stats, *rest = ctx.saved_tensors
        arrays = Arrays(*rest)
        moves = [*tangents[2:4], *(tangents[6 + index] for index in DIFFERENTIABLE)]
        lse_shape = stats.shape[:-1] if stats.dim() == o.dim() else stats.shape
        found = backward_tangents(moves, do, dlse, o, lse_shape, arrays, _meaning(ctx.settings))
        return tuple(x if wanted else None for x, wanted in zip(found, ctx.need))


def _mapped_backward(
    function: Any, info: Any, in_dims: Any, settings: OpSettings, need: Any, args: Any
) -> Any:
    outer, arrays = args[:4], Arrays(*args[4:])
    outer_dims, dims = in_dims[:4], Arrays(*in_dims[4:])
    return mapped_backward(function, info, settings, need, outer, outer_dims, arrays, dims)


class Attention(torch.autograd.Function):
    """(settings, *arrays) -> (o, lse, stats)."""

    @staticmethod
    def forward(settings: OpSettings, *arrays: Any) -> Any:
        return ops.run_kernel(ops.attention_kernel, *arrays, *settings, WITH_STATS)

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
    def vmap(info: Any, in_dims: Any, settings: OpSettings, *arrays: Any) -> Any:
        return mapped_forward(Attention, info, settings, Arrays(*arrays), Arrays(*in_dims[1:]))


class DualAttention(Attention):
    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:
        return _attention_gradients(DualAttentionBackward, ctx, do, dlse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: OpSettings, *arrays: Any) -> Any:
        return mapped_forward(DualAttention, info, settings, Arrays(*arrays), Arrays(*in_dims[1:]))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arrays = Arrays(*ctx.saved_tensors[:NUM_ARRAYS])
        moves = [tangents[1 + index] for index in DIFFERENTIABLE]
        return (*forward_tangents(arrays, _meaning(ctx.settings), moves), None)


def _attention_gradients(function: Any, ctx: Any, do: Any, dlse: Any) -> Any:
    *arrays, o, stats = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * (1 + NUM_ARRAYS)
    need = [ctx.needs_input_grad[1 + index] for index in DIFFERENTIABLE]
    if guards.is_batched_gradient(do, dlse):
        found = batched_gradients(do, dlse, o, stats, arrays, ctx.settings, need)
        return (None, *_placed(found))
    return (None, *_placed(function.apply(ctx.settings, need, do, dlse, o, stats, *arrays)))


def batched_gradients(
    do: Any, dlse: Any, o: Tensor, stats: Tensor, arrays: Any, settings: OpSettings, need: Any
) -> Any:
    """The gradients when many do arrive at once (is_grads_batched=True)."""
    with ops.below_autograd():
        found = ops.attention_batched_backward(do, dlse, o, stats, *arrays, *settings, need)
    return [x if wanted else None for x, wanted in zip(found, need)]


def _placed(gradients: Any) -> list[Any]:
    """Gradients at the indices of their arrays."""
    full: list[Any] = [None] * NUM_ARRAYS
    for index, x in zip(DIFFERENTIABLE, gradients):
        full[index] = x
    return full


def records(tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attention_autograd(*args: Any) -> Any:
    arrays, settings, (outputs,) = split(args)
    if not records(arrays):
        return ops.run_kernel(ops.attention_kernel, *args)
    o, lse, stats = Attention.apply(settings, *arrays)
    return o, lse if outputs >= WITH_LSE else None, stats if outputs >= WITH_STATS else None


def _attention_backward_autograd(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, settings, (need,) = split(args)
    if not records((do, dlse, *arrays)):
        return ops.run_backward_kernel(do, dlse, o, stats, *args)
    return AttentionBackward.apply(settings, need, do, dlse, o, stats, *arrays)


def _attention_out_autograd(*args: Any, out: Tensor, lse: Any) -> None:
    arrays, _, _ = split(args)
    if records((*arrays, out, lse)):
        raise RuntimeError("fulmen.attention: out= records no gradient; leave out=None")
    with ops.below_autograd():
        ops.attention_out(*args, out=out, lse=lse)


class EagerAttention(torch.autograd.Function):
    """(settings, out_dtype, return_lse, *arrays) -> o, or (o, lse); arrays may end with v."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, out_dtype: Any, return_lse: bool, *arrays: Any
    ) -> Any:
        outputs = WITH_STATS if return_lse else STATS_ONLY
        o, lse, stats = run_forward(full(arrays), settings, out_dtype, outputs)
        ctx.settings = settings, out_dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, o, stats)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        *arrays, o, stats = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * (3 + len(arrays))
        wanted = ctx.needs_input_grad[3:]
        need = [index < len(arrays) and wanted[index] for index in DIFFERENTIABLE]
        settings, out_dtype = ctx.settings
        every = full(tuple(arrays))
        found = gradients_of(do, dlse, o, stats, every, settings, out_dtype, need)
        if len(arrays) == 3:
            return (None, None, None, *found[:3])
        return (None, None, None, *_placed(found))


def full(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """All inputs, where arrays may end with v."""
    return arrays if len(arrays) == NUM_ARRAYS else arrays + _ABSENT


_ABSENT = (None,) * (NUM_ARRAYS - 3)


def gradients_of(
    do: Any,
    dlse: Any,
    o: Any,
    stats: Any,
    arrays: tuple[Any, ...],
    settings: Settings,
    out_dtype: Any,
    need: Any,
) -> Any:
    """(dq, dk, dv, dbias, dsinks) in a backward pass, as the modes around it ask for."""
    is_batched = guards.is_batched_gradient(do, dlse)
    if is_batched or torch.is_grad_enabled() or guards.needs_operators():
        of_operator = op_settings(settings, out_dtype)
        if is_batched:
            return batched_gradients(do, dlse, o, stats, arrays, of_operator, need)
        return AttentionBackward.apply(of_operator, need, do, dlse, o, stats, *arrays)
    return run_backward(do, dlse, o, stats, arrays, settings, need)


def _derivable_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, options: int, need: int
) -> tuple[Tensor, ...]:
    """The backward pass of the fast path where derivatives of it are recorded."""
    wanted = [index < 3 and bool(need >> index & 1) for index in range(len(DIFFERENTIABLE))]
    settings = ops.kept_settings[options]
    found = gradients_of(do, None, o, stats, full((q, k, v)), settings, None, wanted)
    return tuple(q.new_empty(0) if x is None else x for x in found[:3])


class Merge(torch.autograd.Function):
    """(layout, out_dtype, sinks, *os, *lses) -> (o, lse); it differentiates again by itself.

    With L = lse of the union, T = log(exp(L) + exp(sink)), w = exp(lse of a part - T),
    delta = do . o:

        do of a part = w do
        dlse of a part = w (do . o of the part - delta) + exp(its lse - L) dlse
        dsinks = - sum over rows of exp(sink - T) delta
    """

    @staticmethod
    def forward(layout: str, out_dtype: Any, sinks: Any, *parts: Tensor) -> Any:
        half = len(parts) // 2
        with ops.below_autograd():
            return ops.merge(list(parts[:half]), list(parts[half:]), sinks, layout, out_dtype)

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
            is_empty = part_lse == -torch.inf  # it took no part: what its o holds is nobody's
            beside_o = _beside_o(is_empty, ctx.layout).unsqueeze(-1)
            share = _share(part_lse, level)
            found = _beside_o(share, ctx.layout).unsqueeze(-1) * do
            dos.append(found.masked_fill(beside_o, 0.0).to(part.dtype))
            along = _along(do, part.masked_fill(beside_o, 0.0), lse, ctx.layout)
            found = share * (along - delta)
            if dlse is not None:
                found = found + _share(part_lse, lse) * dlse
            dlses.append(found.masked_fill(is_empty, 0.0).to(part_lse.dtype))
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


def merge(
    os: list[Tensor], lses: list[Tensor], sinks: Any, layout: str, out_dtype: Any
) -> tuple[Tensor, Tensor]:
    """The merge of plain tensors, which records nothing."""
    os = [x.resolve_neg() for x in os]
    return merge_arrays(list(zip(os, lses)), sinks, layout, out_dtype)


def _merge_fake(
    os: list[Tensor], lses: list[Tensor], sinks: Any, layout: str, out_dtype: Any
) -> tuple[Tensor, Tensor]:
    o = os[0].new_empty(os[0].shape, dtype=out_dtype or os[0].dtype)
    shape = ops.lse_like(o, LAYOUTS[layout].code).shape
    return o, lses[0].new_empty(shape, dtype=accumulator(lses[0].dtype))


def _merge_autograd(os: Any, lses: Any, sinks: Any, layout: str, out_dtype: Any) -> Any:
    if not records((sinks, *os, *lses)):
        with ops.below_autograd():
            return ops.merge(os, lses, sinks, layout, out_dtype)
    return Merge.apply(layout, out_dtype, sinks, *os, *lses)


ops.library.impl("attention", _attention_autograd, "Autograd")
ops.library.impl("attention_backward", _attention_backward_autograd, "Autograd")
ops.library.impl("attention_out", _attention_out_autograd, "Autograd")
ops.library.impl("merge", _merge_autograd, "Autograd")
ops.library.impl("plain_derivable", _derivable_gradients, "CompositeImplicitAutograd")
for _key in ("CPU", "CUDA"):
    ops.library.impl("merge", merge, _key)
torch.library.register_fake("fulmen::merge", _merge_fake, lib=ops.library)
