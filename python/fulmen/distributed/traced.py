# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attention` where torch.compile traces it: one operator and its gradient.

A graph holds tensors and numbers. The object that is called, and what a call asks for beside its
tensors, are known by numbers that are given when the call is traced.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .steps import Saved

if TYPE_CHECKING:
    from . import ContextParallel
    from .autograd import Call

_OBJECTS: weakref.WeakValueDictionary[int, ContextParallel] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_FORMS: dict[int, Any] = {}
_NUMBER_OF: dict[Any, int] = {}


def numbered(made: ContextParallel) -> int:
    """A number that finds an object as long as it lives."""
    number = next(_NUMBERS)
    _OBJECTS[number] = made
    return number


def attention(
    called: ContextParallel, q: Tensor, k: Tensor, v: Tensor, layout: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(o, lse): what a compiler traces."""
    tensors: list[Tensor] = []
    form = tuple((name, _packed(options[name], tensors)) for name in sorted(options))
    number = _number_of((layout, form))
    found = torch.ops.fulmen.context_parallel(q, k, v, tensors, called.number, number)
    return found[0], found[1]


def _packed(x: Any, tensors: list[Tensor]) -> Any:
    """A value of an option without its tensors, which join the list: nested tuples of constants."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return (Tensor, len(tensors) - 1)
    if isinstance(x, (tuple, list)):
        return (type(x), tuple(_packed(y, tensors) for y in x))
    if isinstance(x, dict):
        return (dict, tuple((name, _packed(y, tensors)) for name, y in x.items()))
    if dataclasses.is_dataclass(x):  # of fulmen.masks, and a score
        names = [field.name for field in dataclasses.fields(x)]
        return (type(x), tuple(_packed(getattr(x, name), tensors) for name in names))
    return (None, x)


def _unpacked(form: Any, tensors: Sequence[Tensor]) -> Any:
    made, what = form
    if made is None:
        return what
    if made is Tensor:
        return tensors[what]
    if made is dict:
        return {name: _unpacked(x, tensors) for name, x in what}
    parts = [_unpacked(x, tensors) for x in what]
    return made(parts) if made in (tuple, list) else made(*parts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_of(form: Any) -> int:
    """The same for equal forms; the compiler asks once."""
    number = _NUMBER_OF.setdefault(form, len(_NUMBER_OF))
    _FORMS[number] = form
    return number


def _call(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], called: int, form: int
) -> tuple[ContextParallel, str, dict[str, Any]]:
    made = _OBJECTS.get(called)
    if made is None:
        raise ArgumentError(
            "the ContextParallel of this compiled graph is gone; keep it for as long as the graph"
        )
    layout, options = _FORMS[form]
    return made, layout, {name: _unpacked(x, tensors) for name, x in options}


_operator = torch.library.custom_op


@_operator("fulmen::context_parallel", mutates_args=())  # type: ignore[untyped-decorator]
def _forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], called: int, form: int
) -> list[Tensor]:
    """o, lse and stats; where ranks share rows by heads also q, k, v and o by heads."""
    made, layout, options = _call(q, k, v, tensors, called, form)
    call = made._agreed(q, k, v, layout, options)
    o, lse, saved = call.forward(q, k, v)
    found = [o.contiguous(), lse.contiguous(), saved.stats.contiguous()]
    return [*found, *(x.contiguous() for x in saved[:4])] if call.near.size > 1 else found


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, tensors: Any, called: int, form: int) -> list[Tensor]:
    made, layout, options = _call(q, k, v, tensors, called, form)
    call = made._call(q, k, v, layout, options)
    batch, head, row = (0, 1, 2) if layout == "bhsd" else (0, 2, 1)
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((q.shape[batch], q.shape[head], q.shape[row]), dtype=sums)
    size = call.near.size
    rows = call.shards.merged(call.far.size).rows(call.far.rank)
    heads = q.shape[head] // size
    found = [o, lse, q.new_empty((q.shape[batch], heads, rows, 2), dtype=sums)]
    if size > 1:
        kv_heads = k.shape[head] * call.repeats // size
        shapes = (heads, q.shape[3]), (kv_heads, k.shape[3]), (kv_heads, v.shape[3])
        for of_heads, dim in (*shapes, (heads, v.shape[3])):
            found.append(q.new_empty((q.shape[batch], of_heads, rows, dim)))
    return found


@_operator(  # type: ignore[untyped-decorator]
    "fulmen::context_parallel_backward", mutates_args=()
)
def _backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor],
    saved: Sequence[Tensor], called: int, form: int,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv, and of each of the tensors, empty where it has none."""
    made, layout, options = _call(q, k, v, tensors, called, form)
    call: Call = made._call(q, k, v, layout, options)
    own = saved[3:7] if call.near.size > 1 else [call._heads_first(x) for x in (q, k, v, saved[0])]
    kept = Saved(own[0], own[1], own[2], own[3], saved[2])
    floats = call.problem.differentiable
    found = call.backward(do, dlse, kept, tuple(floats))
    of_tensors = []
    for x in tensors:
        gradient = x.new_empty(0)
        if x is call.problem.sinks and found.dsinks is not None:
            gradient = found.dsinks
        for name, y in floats.items():
            if y is x:
                gradient = found.of_capture(name, x)
        of_tensors.append(gradient.contiguous())
    return [*(x.contiguous() for x in found[:3]), *of_tensors]


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, tensors: Any, saved: Any,
    called: int, form: int,
) -> list[Tensor]:  # fmt: skip
    made, layout, options = _call(q, k, v, tensors, called, form)
    call = made._call(q, k, v, layout, options)
    known = [call.problem.sinks, *call.problem.differentiable.values()]
    of_tensors = [x.new_empty(x.shape if any(x is y for y in known) else 0) for x in tensors]
    return [*(x.new_empty(x.shape) for x in (q, k, v)), *of_tensors]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, tensors, called, form = inputs
    ctx.called, ctx.form, ctx.count = called, form, len(tensors)
    ctx.save_for_backward(q, k, v, *tensors, *output)


def _differentiated(ctx: Any, gradients: Any) -> Any:
    q, k, v, *more = ctx.saved_tensors
    tensors, saved = more[: ctx.count], more[ctx.count :]
    found = torch.ops.fulmen.context_parallel_backward(
        gradients[0], gradients[1], q, k, v, tensors, saved, ctx.called, ctx.form
    )
    of_tensors = [None if y.shape != x.shape else y for x, y in zip(tensors, found[3:])]
    return found[0], found[1], found[2], of_tensors, None, None


_forward.register_autograd(_differentiated, setup_context=_keep)
