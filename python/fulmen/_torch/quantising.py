# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen::quantise and fulmen::hadamard: operators that compile without graph breaks.

    quantise(x, scale, constant, lengths, dtype, per, rotate, find_constant, find_scale, headroom,
             layout) -> (values, scale, constant)    what is not found is empty
    hadamard(x, constant, layout) -> out    differentiable in x: its derivative is the rotation

quantise has no derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..layouts import LAYOUTS, Layout
from ..quantising import (
    How,
    check_dtype,
    dtypes_of_values,
    quantise_arrays,
    rotation_of,
    shape_of_scale,
)
from . import guards, ops
from .arguments import refuse_stream, scale_tensor, tensor_of

_TAGS = (torch.Tag.pt2_compliant_tag,)
ops.library.define(
    "quantise(Tensor x, Tensor? scale, Tensor? constant, Tensor? lengths, str dtype, str per, "
    "bool rotate, bool find_constant, bool find_scale, float headroom, str layout) -> "
    "(Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
ops.library.define("hadamard(Tensor x, Tensor? constant, str layout) -> Tensor", tags=_TAGS)
_NAMES = dtypes_of_values()
quantise_operator = torch.ops.fulmen.quantise.default
hadamard_operator = torch.ops.fulmen.hadamard.default


def quantise(
    x: Any, constant: Any, scale: Any, lengths: Any, how: How, axes: Layout, stream: Any
) -> tuple[Any, Any, Any]:
    """`fulmen.quantise` of a tensor."""
    refuse_stream(stream)
    axes.check(x, "x")
    check_dtype(how.dtype, _NAMES)
    scale = scale_tensor("scale", scale, x.device)
    given = None if how.find_constant else tensor_of("constant", constant, x.device)
    lengths = tensor_of("lengths", lengths, x.device)
    for name, y in (("x", x), ("scale", scale), ("constant", given)):
        _refuse_gradient(name, y)
    values, *found = quantise_operator(x, scale, given, lengths, *how, axes.name)
    return (
        values,
        found[0] if how.find_scale else scale,
        found[1] if how.find_constant else given,
    )


def hadamard(x: Any, constant: Any, axes: Layout, stream: Any) -> Any:
    """`fulmen.hadamard` of a tensor, differentiable in x."""
    refuse_stream(stream)
    axes.check(x, "x")
    constant = tensor_of("constant", constant, x.device)
    if guards.is_transformed():
        return Hadamard.apply(x, constant, axes.name)
    return hadamard_operator(x, constant, axes.name)


def _refuse_gradient(name: str, x: Any) -> None:
    if torch.is_grad_enabled() and x is not None and x.requires_grad:
        raise UnsupportedError(
            f"{name} requires grad; numbers of 8 bits have no derivatives: pass {name}.detach(), "
            "or call under torch.no_grad()"
        )


def _quantise(x: Tensor, scale: Any, constant: Any, lengths: Any, *rest: Any) -> Any:
    *how, layout = rest
    asked = How(*how)
    made = quantise_arrays(x, constant, scale, lengths, asked, LAYOUTS[layout])
    nothing = x.new_empty(0, dtype=torch.float32)
    return (
        made.values,
        made.scale if asked.find_scale else nothing,
        made.constant if asked.find_constant else nothing.clone(),
    )


def _quantise_fake(x: Tensor, scale: Any, constant: Any, lengths: Any, *rest: Any) -> Any:
    *how, layout = rest
    asked, axes = How(*how), LAYOUTS[layout]

    def found(is_asked: bool, per: str) -> Tensor:
        shape = shape_of_scale(tuple(x.shape), per, axes) if is_asked else (0,)
        return x.new_empty(shape, dtype=torch.float32)

    values = torch.empty(x.shape, dtype=getattr(torch, asked.dtype), device=x.device)
    return values, found(asked.find_scale, asked.per), found(asked.find_constant, "channel")


def _quantise_autograd(*args: Any) -> Any:
    for name, x in zip(("x", "scale", "constant"), args):
        _refuse_gradient(name, x)
    with ops.below_autograd():
        return quantise_operator(*args)


def _hadamard(x: Tensor, constant: Any, layout: str) -> Tensor:
    how = rotation_of(x.dtype)
    rotated: Tensor = quantise_arrays(x, constant, None, None, how, LAYOUTS[layout]).values
    return rotated


def _hadamard_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class Hadamard(torch.autograd.Function):
    """(x, constant, layout) -> out; it differentiates again by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, constant: Any, layout: str) -> Tensor:
        with ops.below_autograd():
            return hadamard_operator(x, constant, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Hadamard.apply(gradient, None, ctx.layout), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return Hadamard.apply(tangent, None, ctx.layout)


def _hadamard_autograd(x: Tensor, constant: Any, layout: str) -> Tensor:
    if torch.is_grad_enabled() and constant is not None and constant.requires_grad:
        raise UnsupportedError(
            "constant requires grad; hadamard is differentiable in x alone: pass constant.detach()"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        return Hadamard.apply(x, constant, layout)
    with ops.below_autograd():
        return hadamard_operator(x, constant, layout)


ops.library.impl("quantise", _quantise_autograd, "Autograd")
ops.library.impl("hadamard", _hadamard_autograd, "Autograd")
for _key in ("CPU", "CUDA"):
    ops.library.impl("quantise", _quantise, _key)
    ops.library.impl("hadamard", _hadamard, _key)
torch.library.register_fake("fulmen::quantise", _quantise_fake, lib=ops.library)
torch.library.register_fake("fulmen::hadamard", _hadamard_fake, lib=ops.library)
