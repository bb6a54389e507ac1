# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen::append_kv and fulmen::rotary: operators that compile without graph breaks.

    append_kv(k_pages!, v_pages!, q_out!, ..., interleaved, layout) -> ()    writes its first three
    rotary(x, positions, cos, sin, interleaved, layout) -> out    differentiable in x

append_kv has no derivatives. That of the rotation is the rotation by -sin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..appending import (
    append_arrays,
    append_in_memory,
    rotary_arrays,
    written,
)
from ..array_types import CURRENT_STREAM, NO_STREAM, TorchType
from ..errors import UnsupportedError
from ..layouts import LAYOUTS, layout_of
from ..page_tables import SCALES, AppendArrays
from . import guards, ops
from .arguments import refuse_stream, scale_tensor, tensor_of

_WRITTEN = ("k_pages", "v_pages", "q_out")
_NEEDED = ("k_pages", "k_new")


def _argument(index: int, name: str) -> str:
    mutated = f"({'abc'[index]}!)" if name in _WRITTEN else ""
    return f"Tensor{mutated}{'' if name in _NEEDED else '?'} {name}"


_ARRAYS = ", ".join(_argument(index, name) for index, name in enumerate(AppendArrays._fields))
_TAGS = (torch.Tag.pt2_compliant_tag,)
ops.library.define(f"append_kv({_ARRAYS}, bool interleaved, str layout) -> ()", tags=_TAGS)
ops.library.define(
    "rotary(Tensor x, Tensor? positions, Tensor cos, Tensor sin, bool interleaved, str layout) -> "
    "Tensor",
    tags=_TAGS,
)
append_operator = torch.ops.fulmen.append_kv.default
rotary_operator = torch.ops.fulmen.rotary.default


def append_kv(
    k_pages: Any,
    v_pages: Any,
    k_new: Any,
    v_new: Any,
    named: dict[str, Any],
    interleaved: bool,
    layout: str,
    stream: Any,
) -> Any:
    """`fulmen.append_kv` of tensors. named: the arrays behind v_new."""
    refuse_stream(stream)
    axes = layout_of(layout, named["cu_new"] is not None)
    named = {
        name: scale_tensor(name, x, k_pages.device)
        if name in SCALES
        else tensor_of(name, x, k_pages.device)
        for name, x in named.items()
    }
    arrays = AppendArrays(k_pages, v_pages, None, k_new, v_new, **named)
    for x, name in ((k_new, "k_new"), (v_new, "v_new")):
        tensor_of(name, x, k_pages.device)
    written(k_pages, v_pages, k_new, v_new, axes)
    if arrays.q is not None:
        axes.check(arrays.q, "q")
        arrays = arrays._replace(q_out=torch.empty_like(arrays.q))
    if _is_read_and_plain(arrays):  # without the operator's two frames in Python
        append_in_memory(arrays, interleaved, axes, (_stream_of(k_pages), TorchType))
        torch.autograd.graph.increment_version(k_pages if v_pages is None else (k_pages, v_pages))
    else:
        append_operator(*arrays, interleaved, axes.name)
    return arrays.q_out


def _is_read_and_plain(arrays: AppendArrays) -> bool:
    """Whether nothing watches the call and no array of it records a gradient."""
    second = arrays.k_new if arrays.v_pages is None else arrays.v_pages
    if not guards.allows_fast_path(arrays.k_pages, second, arrays.k_new):
        return False
    records = torch.is_grad_enabled()
    for x in arrays:
        if x is None:
            continue
        if type(x) not in guards.PLAIN or x.is_neg() or (records and x.requires_grad):
            return False
    return True


def rotary(
    x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool, layout: str, stream: Any
) -> Any:
    """`fulmen.rotary` of a tensor, differentiable in x."""
    refuse_stream(stream)
    axes = layout_of(layout)
    axes.check(x, "x")
    positions = tensor_of("positions", positions, x.device)
    tables = (tensor_of("cos", cos, x.device), tensor_of("sin", sin, x.device))
    if guards.is_transformed():
        return Rotary.apply(x, positions, *tables, interleaved, axes.name)
    return rotary_operator(x, positions, *tables, interleaved, axes.name)


def _append(*args: Any) -> None:
    *arrays, interleaved, layout = args
    found = AppendArrays(*arrays)
    where = _stream_of(found.k_pages), TorchType
    append_arrays(found, interleaved, LAYOUTS[layout], where)


def _stream_of(x: Tensor) -> int:
    return CURRENT_STREAM if x.is_cuda else NO_STREAM


def _append_autograd(*args: Any) -> None:
    for name, x in zip(AppendArrays._fields, args):
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad; append_kv has no backward pass: pass {name}.detach(), or "
                "call under torch.no_grad()"
            )
    with ops.below_autograd():
        append_operator(*args)


def _rotary(
    x: Tensor, positions: Any, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
) -> Tensor:
    return rotary_arrays(x, positions, cos, sin, interleaved, LAYOUTS[layout])


def _rotary_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


class Rotary(torch.autograd.Function):
    """(x, positions, cos, sin, interleaved, layout) -> out; it differentiates again by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, positions: Any, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
    ) -> Tensor:
        with ops.below_autograd():
            return rotary_operator(x, positions, cos, sin, interleaved, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, positions, cos, sin, ctx.interleaved, ctx.layout = inputs
        ctx.has_positions = positions is not None
        tensors = (cos, sin, positions) if ctx.has_positions else (cos, sin)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin, *positions = ctx.saved_tensors
        place = positions[0] if positions else None
        made = Rotary.apply(gradient, place, cos, -sin, ctx.interleaved, ctx.layout)
        return made, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        cos, sin, *positions = ctx.saved_tensors
        place = positions[0] if positions else None
        return Rotary.apply(tangent, place, cos, sin, ctx.interleaved, ctx.layout)


def _rotary_autograd(
    x: Tensor, positions: Any, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
) -> Tensor:
    for name, table in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and table.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad; rotary is differentiable in x alone: pass {name}.detach()"
            )
    if torch.is_grad_enabled() and x.requires_grad:
        return Rotary.apply(x, positions, cos, sin, interleaved, layout)
    with ops.below_autograd():
        return rotary_operator(x, positions, cos, sin, interleaved, layout)


ops.library.impl("append_kv", _append_autograd, "Autograd")
ops.library.impl("rotary", _rotary_autograd, "Autograd")
for _key in ("CPU", "CUDA"):
    ops.library.impl("append_kv", _append, _key)
    ops.library.impl("rotary", _rotary, _key)
torch.library.register_fake("fulmen::append_kv", lambda *_: None, lib=ops.library)
torch.library.register_fake("fulmen::rotary", _rotary_fake, lib=ops.library)
