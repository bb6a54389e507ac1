# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators of the namespace fulmen, with kernels for CPU and CUDA and for fake tensors.

    attention(arrays, settings, outputs) -> (o, lse or None, stats or None)
    attention_backward(do, dlse, o, stats, arrays, settings, need) -> (dq, dk, dv, dbias, dsinks)
    attention_kernel, attention_backward_kernel    the same without derivatives
    attention_traced                               attention, for torch.jit.trace
    attention_out(arrays, settings, out=, lse=) -> ()
    merge(os, lses, sinks, layout, out_dtype) -> (o, lse)
    plain, plain_backward, plain_derivable, kept, planned    behind the fast path (fast_path.py)

`arrays` are the inputs of the schema and `settings` three values: the options as 64-bit words, the
code of the layout, the dtype of o. The Autograd kernels are in autograd.py; they end in
`..._kernel`, which is all that a compiled program calls and which the library itself computes from
PyTorch 2.10 on (src/ffi/torch_operators.cpp). Lengths lie in tensors, limits of lengths in
words that may be symbolic: one graph holds for any. Results are laid out in memory as the tensor
that they belong to: o and dq as q, dk as k, dv as v.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _library
from .._calls import Where, run
from .._library import announce_nvrtc, raised_by, schema
from ..array_types import CURRENT_STREAM, NO_STREAM, TorchType, in_memory
from ..errors import Error
from ..layouts import LAYOUTS
from ..options import Settings
from . import guards
from .reference import Arrays as Arrays

_schema = schema()
DIFFERENTIABLE = _schema.differentiable
FLOATING = tuple(getattr(torch, x["name"]) for x in _schema.dtypes if x["kind"] == "float")
QUANTISED = tuple(getattr(torch, name) for name in _schema.quantised)  # of q, k and v
NUM_ARRAYS = len(_schema.inputs)

_BIAS, _RNG = (_schema.inputs.index(name) for name in ("bias", "rng"))
_Q_IDS, _KV_IDS = (_schema.inputs.index(name) for name in ("q_ids", "kv_ids"))
_PAGE_TABLE = _schema.inputs.index("page_table")


class OpSettings(NamedTuple):
    """Arguments of an operator that are no tensors."""

    options: Sequence[int]  # the words of fulmen_problem; sizes among them may be symbolic
    layout: int  # code of the layout
    out_dtype: Any = None


def op_settings(settings: Settings, out_dtype: Any = None) -> OpSettings:
    """Settings as the operators take them."""
    return OpSettings(list(settings.words), settings.layout.code, out_dtype)


@lru_cache(maxsize=1024)
def _settings_of_words(words: tuple[int, ...], code: int) -> Settings:
    layout = next(layout for layout in LAYOUTS.values() if layout.code == code)
    return Settings(np.array(words, np.int64).tobytes(), layout)


def settings_of(given: OpSettings) -> Settings:
    """The inverse of op_settings."""
    return _settings_of_words(tuple(given.options), given.layout)


# What the library keeps for the fast path, by its numbers.
kept_settings: dict[int, Settings] = {}

# `outputs` of fulmen::attention: o, and ...
O_ONLY, WITH_LSE, WITH_STATS, STATS_ONLY = 1, 2, 3, 4

_ON_CPU: Where = (NO_STREAM, TorchType)
_ON_GPU: Where = (CURRENT_STREAM, TorchType)


def like(x: Tensor) -> Tensor:
    """Memory for a gradient: the extents and the memory order of x."""
    if x.is_contiguous() or x.stride(-1) == 1:
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def o_like(q: Tensor, v: Tensor, out_dtype: Any) -> Tensor:
    """Memory for o: the extents of q with the last axis of v, in the memory order of q."""
    dim = v.shape[-1]
    if q.stride(-1) == 1:
        if dim == q.shape[-1]:
            return (
                torch.empty_like(q) if out_dtype is None else torch.empty_like(q, dtype=out_dtype)
            )
        order = sorted(range(q.dim() - 1), key=lambda axis: -q.stride(axis))
        shape = (*q.shape[:-1], dim)
        return torch.empty_permuted(
            shape, (*order, q.dim() - 1), dtype=out_dtype or q.dtype, device=q.device
        )
    return q.new_empty((*q.shape[:-1], dim), dtype=out_dtype)


def lse_like(q: Tensor, layout: int, *last: int) -> Tensor:
    """Memory for lse, or with one more axis for stats."""
    shape = q.shape[:-1]
    if layout & 1:  # rows before heads
        shape = (*shape[:-2], shape[-1], shape[-2])
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return q.new_empty(*shape, *last)  # torch reads separate numbers faster than a tuple
    return q.new_empty(*shape, *last, dtype=torch.float32)


def forward_results(
    q: Tensor, v: Tensor, layout: int, out_dtype: Any, outputs: int
) -> tuple[Any, ...]:
    """Memory for (o, lse, stats), those that `outputs` asks for."""
    if q.shape == v.shape and out_dtype is None and q.is_contiguous():
        o = torch.empty_like(q)  # o_like, for most calls
    else:
        o = o_like(q, v, out_dtype)
    if outputs == O_ONLY:
        return o, None, None
    lse = None if outputs == STATS_ONLY else lse_like(q, layout)
    return o, lse, None if outputs == WITH_LSE else lse_like(q, layout, 2)


def _prepared(
    arrays: tuple[Any, ...], settings: Settings
) -> tuple[Settings, tuple[Any, ...], Where]:
    """Settings, arrays and stream, as fulmen.options.prepare would have them from keywords."""
    q, k, v, bias = arrays[0], arrays[1], arrays[2], arrays[_BIAS]
    rng = arrays[_RNG]
    if rng is not None and not q.is_cuda:  # on a GPU the kernel reads it
        seed, offset = rng.tolist()
        settings = settings.replaced(rng_seed=seed % 2**64, rng_offset=offset)
        arrays = (*arrays[:_RNG], None, *arrays[_RNG + 1 :])
    layout = settings.layout
    if not (q.dim() == k.dim() == v.dim() == layout.rank):
        layout.check_all(q, k, v, arrays[_PAGE_TABLE])
    if q.is_neg() or k.is_neg() or v.is_neg() or (bias is not None and bias.is_neg()):
        arrays = in_memory(arrays, _schema.inputs)
    if arrays[_Q_IDS] is not None and arrays[_KV_IDS] is None:
        arrays = (*arrays[:_KV_IDS], arrays[_Q_IDS], *arrays[_KV_IDS + 1 :])
    return settings, arrays, _ON_GPU if q.is_cuda else _ON_CPU


def run_forward(
    arrays: tuple[Any, ...],
    settings: Settings,
    out_dtype: Any,
    outputs: int,
    results: Any = None,
) -> tuple[Any, ...]:
    """(o, lse, stats) of plain tensors; None for what `outputs` leaves out."""
    settings, arrays, where = _prepared(arrays, settings)
    code = settings.layout.code
    if results is None:
        results = forward_results(arrays[0], arrays[2], code, out_dtype, outputs)
    function = _library.library().forward
    run(function, (settings.problem,), where, code, arrays + results, _schema.results)
    return results  # type: ignore[no-any-return]


def run_backward(
    do: Any,
    dlse: Any,
    o: Tensor,
    stats: Tensor,
    arrays: tuple[Any, ...],
    settings: Settings,
    need: Sequence[bool],
) -> tuple[Any, ...]:
    """(dq, dk, dv, dbias, dsinks) of plain tensors; None where `need` does not ask."""
    gradients = tuple(
        [like(arrays[index]) if wanted else None for index, wanted in zip(DIFFERENTIABLE, need)]
    )
    if not any(need):
        return gradients
    if do is None:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
    elif do.is_neg():
        do = do.resolve_neg()
    settings, arrays, where = _prepared(arrays, settings)
    sums = (None, stats) if stats.dim() == o.dim() else (stats, None)  # or lse of a caller's own
    every = (*arrays, o, *sums, do, dlse, *gradients)
    function = _library.library().backward
    run(function, (settings.problem,), where, settings.layout.code, every, _schema.gradients)
    return gradients


def split(args: tuple[Any, ...]) -> tuple[Any, OpSettings, tuple[Any, ...]]:
    """An operator's arguments: arrays, settings, and what follows."""
    end = NUM_ARRAYS + len(OpSettings._fields)
    return Arrays(*args[:NUM_ARRAYS]), OpSettings(*args[NUM_ARRAYS:end]), args[end:]


below_autograd = torch._C._AutoDispatchBelowAutograd
library = torch.library.Library("fulmen", "DEF")

_ARGUMENTS = ", ".join(
    [f"Tensor{'?' if index > 2 else ''} {name}" for index, name in enumerate(_schema.inputs)]
    + ["SymInt[] options", "int layout", "ScalarType? out_dtype"]
)
_FORWARD = f"({_ARGUMENTS}, int outputs) -> (Tensor, Tensor?, Tensor?)"
_BACKWARD = (
    f"(Tensor? do, Tensor? dlse, Tensor o, Tensor stats, {_ARGUMENTS}, "
    f"bool[{len(DIFFERENTIABLE)}] need) -> "
)
_GRADIENTS = f"({', '.join(['Tensor?'] * len(DIFFERENTIABLE))})"
_SCHEMAS = {
    "attention": _FORWARD,
    "attention_kernel": _FORWARD,
    # With a tensor in every place too: torch.jit.trace records no other results.
    "attention_traced": _FORWARD.replace("Tensor?, Tensor?)", "Tensor, Tensor)"),
    "attention_backward": _BACKWARD + _GRADIENTS,
    "attention_backward_kernel": _BACKWARD + _GRADIENTS,
    # The same with a tensor in every place, empty where it is not needed: what the loop that torch
    # runs for is_grads_batched=True can stack, and DTensor can place.
    "attention_batched_backward": _BACKWARD + _GRADIENTS.replace("?", ""),
    "attention_out": f"({_ARGUMENTS}, *, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    "merge": (
        "(Tensor[] os, Tensor[] lses, Tensor? sinks, str layout, ScalarType? out_dtype) -> "
        "(Tensor, Tensor)"
    ),
    "plain": "(Tensor q, Tensor k, Tensor v, int options) -> Tensor",
    **dict.fromkeys(
        ("plain_backward", "plain_derivable"),
        "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats, int options, int need) "
        "-> (Tensor, Tensor, Tensor)",
    ),
}
# No compiler and no mode sees these. `others` are inputs behind v, `which` says of each its index
# among the inputs, 8 bits each.
_EAGER_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor[] others, int which"
_EAGER = {
    "kept": (
        f"({_EAGER_ARGUMENTS}, int options, int outputs, Tensor(a!)? out) -> (Tensor?, Tensor?)"
    ),
    "planned": (
        f"({_EAGER_ARGUMENTS}, int plan, int layout, int outputs, Tensor(a!)? out, "
        "Tensor(b!)? workspace) -> (Tensor?, Tensor?, Tensor?)"
    ),
}
for _name, _text in _SCHEMAS.items():
    library.define(_name + _text, tags=(torch.Tag.pt2_compliant_tag,))
for _name, _text in _EAGER.items():
    library.define(_name + _text)

attention = torch.ops.fulmen.attention.default
attention_kernel = torch.ops.fulmen.attention_kernel.default
attention_traced = torch.ops.fulmen.attention_traced.default
attention_backward = torch.ops.fulmen.attention_backward.default
attention_backward_kernel = torch.ops.fulmen.attention_backward_kernel.default
attention_batched_backward = torch.ops.fulmen.attention_batched_backward.default
attention_out = torch.ops.fulmen.attention_out.default
merge = torch.ops.fulmen.merge.default

# PyTorch's own node, which the library serves: see fast_path.py.
node: Any = guards.found(
    torch.ops, "aten", "_scaled_dot_product_fused_attention_overrideable", "default", "_op"
)


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether this PyTorch took the library's kernels: from 2.10 on."""
    return node is not None and _library.library().add_torch_kernels() == 1


def run_kernel(operator: Any, *args: Any) -> Any:
    """An operator below Autograd; what the library refuses is raised in the class that fits."""
    with below_autograd():
        try:
            return operator(*args)
        except RuntimeError:
            _raise_refusal()
            raise


def run_backward_kernel(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    """attention_backward_kernel; of DTensors, which want a tensor in every place, the other."""
    if type(o).__name__ != "DTensor":
        return run_kernel(attention_backward_kernel, do, dlse, o, stats, *args)
    found = run_kernel(attention_batched_backward, do, dlse, o, stats, *args)
    return tuple(x if wanted else None for x, wanted in zip(found, args[-1]))


def _raise_refusal() -> None:
    try:
        _library.library().raise_refusal()
    except Error as error:
        raise raised_by(error) from None


def _attention(*args: Any) -> tuple[Any, ...]:
    return run_kernel(attention_kernel, *args)  # type: ignore[no-any-return]


def _attention_kernel(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return run_forward(tuple(arrays), settings_of(settings), settings.out_dtype, outputs)


def _forward_fake(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return forward_results(arrays.q, arrays.v, settings.layout, settings.out_dtype, outputs)


def _attention_traced(*args: Any) -> Any:
    return _without_none(attention(*args), args[0])


def _attention_backward(*args: Any) -> Any:
    return run_kernel(attention_backward_kernel, *args)


def _attention_backward_kernel(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, settings, (need,) = split(args)
    return run_backward(do, dlse, o, stats, tuple(arrays), settings_of(settings), need)


def _backward_fake(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, _, (need,) = split(args)
    return tuple(
        like(arrays[index]) if wanted else None for index, wanted in zip(DIFFERENTIABLE, need)
    )


def _without_none(found: Any, o: Tensor) -> Any:
    none = o.new_empty(0)
    return tuple(none.clone() if x is None else x for x in found)


def _attention_batched_backward(do: Any, dlse: Any, o: Tensor, *args: Any) -> Any:
    return _without_none(_attention_backward(do, dlse, o, *args), o)


def _attention_batched_backward_fake(do: Any, dlse: Any, o: Tensor, *args: Any) -> Any:
    return _without_none(_backward_fake(do, dlse, o, *args), o)


def _attention_out(*args: Any, out: Tensor, lse: Any) -> None:
    arrays, settings, _ = split(args)
    run_forward(tuple(arrays), settings_of(settings), None, WITH_LSE, (out, lse, None))


def _attention_out_fake(*args: Any, out: Tensor, lse: Any) -> None:
    return None


def _plain_fake(q: Tensor, k: Tensor, v: Tensor, options: int) -> Tensor:
    return o_like(q, v, None)


def _plain_backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, options: int, need: int
) -> tuple[Tensor, ...]:
    return tuple(
        like(x) if need >> index & 1 else x.new_empty(*x.shape[:-1], 0)
        for index, x in enumerate((q, k, v))
    )


_KERNELS = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_batched_backward": _attention_batched_backward,
    "attention_out": _attention_out,
}
_FAKES = {
    "attention": _forward_fake,
    "attention_kernel": _forward_fake,
    "attention_backward": _backward_fake,
    "attention_backward_kernel": _backward_fake,
    "attention_batched_backward": _attention_batched_backward_fake,
    "attention_out": _attention_out_fake,
    "plain": _plain_fake,
    "plain_backward": _plain_backward_fake,
}
library.impl("attention_traced", _attention_traced, "CompositeImplicitAutograd")
_BELOW_AUTOGRAD = (
    *("attention_kernel", "attention_backward_kernel", "plain", "plain_backward"),
    *_EAGER,
)
if not has_kernels():
    _KERNELS["attention_kernel"] = _attention_kernel
    _KERNELS["attention_backward_kernel"] = _attention_backward_kernel
if torch.version.cuda is not None:
    announce_nvrtc()
for _key in ("CPU", "CUDA"):
    for _name, _kernel in _KERNELS.items():
        library.impl(_name, _kernel, _key)
    for _name in _BELOW_AUTOGRAD:
        library.impl(_name, torch.library.fallthrough_kernel, f"Autograd{_key}")
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"fulmen::{_name}", _fake, lib=library)
