# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators of the namespace fulmen, with kernels for CPU and CUDA and for fake tensors.

    attention(arrays, settings, outputs) -> (o, lse or None, stats or None)
    attention_backward(do, dlse, o, stats, arrays, settings, need) -> (dq, dk, dv, dbias, dsinks)
    attention_kernel, attention_backward_kernel    the same without derivatives
    attention_out(arrays, settings, out=, lse=) -> ()
    merge(os, lses, sinks, layout, out_dtype) -> (o, lse)
    plain, plain_backward, plain_derivable    behind the shortest way (plain.py)

The Autograd kernels are in autograd.py and merging.py; they end in `..._kernel`, which is all that
a compiled program calls and which the library itself computes from PyTorch 2.10 on
(src/ffi/torch_operators.cpp). Lengths are SymInt or lie in tensors: one graph holds for any.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._nvrtc import announce
from ..errors import Error
from . import guards
from .kernels import (
    WITH_LSE,
    accumulator,
    forward_results,
    like,
    lse_like,
    o_like,
    run_backward,
    run_forward,
    run_merge,
    split,
)
from .settings import ARRAYS_SCHEMA, DIFFERENTIABLE, SETTINGS_SCHEMA

below_autograd = torch._C._AutoDispatchBelowAutograd
library = torch.library.Library("fulmen", "DEF")

_FORWARD = f"({ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, int outputs) -> (Tensor, Tensor?, Tensor?)"
_BACKWARD = (
    f"(Tensor? do, Tensor? dlse, Tensor o, Tensor stats, {ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, "
    "bool[5] need) -> "
)
_SCHEMAS = {
    "attention": _FORWARD,
    "attention_kernel": _FORWARD,
    "attention_backward": _BACKWARD + "(Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)",
    "attention_backward_kernel": _BACKWARD + "(Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)",
    # The same with a tensor in every place, empty where it is not needed: what the loop that torch
    # runs for is_grads_batched=True can stack.
    "attention_batched_backward": _BACKWARD + "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_out": (
        f"({ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, *, Tensor(a!) out, Tensor(b!)? lse) -> ()"
    ),
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
for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

attention = torch.ops.fulmen.attention.default
attention_kernel = torch.ops.fulmen.attention_kernel.default
attention_backward = torch.ops.fulmen.attention_backward.default
attention_backward_kernel = torch.ops.fulmen.attention_backward_kernel.default
attention_batched_backward = torch.ops.fulmen.attention_batched_backward.default
attention_out = torch.ops.fulmen.attention_out.default
merge = torch.ops.fulmen.merge.default

# PyTorch's own node, which the library serves: see plain.py.
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


def _raise_refusal() -> None:
    try:
        _library.library().raise_refusal()
    except Error as error:
        raise error.with_traceback(None) from None


def _attention(*args: Any) -> tuple[Any, ...]:
    return run_kernel(attention_kernel, *args)  # type: ignore[no-any-return]


def _attention_kernel(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return run_forward(tuple(arrays), settings, outputs)


def _attention_fake(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return forward_results(arrays.q, arrays.v, settings, outputs)


def _attention_backward(*args: Any) -> Any:
    return run_kernel(attention_backward_kernel, *args)


def _attention_backward_kernel(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, settings, (need,) = split(args)
    return run_backward(do, dlse, o, stats, tuple(arrays), settings, need)


def _attention_backward_fake(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
    arrays, _, (need,) = split(args)
    return tuple(
        like(arrays[place]) if wanted else None for place, wanted in zip(DIFFERENTIABLE, need)
    )


def _attention_batched_backward(*args: Any) -> Any:
    none = args[2].new_empty(0)
    return tuple(none.clone() if x is None else x for x in _attention_backward(*args))


def _attention_batched_backward_fake(*args: Any) -> Any:
    none = args[2].new_empty(0)
    return tuple(none.clone() if x is None else x for x in _attention_backward_fake(*args))


def _attention_out(*args: Any, out: Tensor, lse: Any) -> None:
    arrays, settings, _ = split(args)
    run_forward(tuple(arrays), settings, WITH_LSE, (out, lse, None))


def _attention_out_fake(*args: Any, out: Tensor, lse: Any) -> None:
    return None


def _merge_fake(
    os: list[Tensor], lses: list[Tensor], sinks: Any, layout: str, out_dtype: Any
) -> tuple[Tensor, Tensor]:
    o = os[0].new_empty(os[0].shape, dtype=out_dtype or os[0].dtype)
    return o, lses[0].new_empty(lse_like(o, layout).shape, dtype=accumulator(lses[0].dtype))


def _plain_fake(q: Tensor, k: Tensor, v: Tensor, options: int) -> Tensor:
    return o_like(q, v, None)


def _plain_backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, options: int, need: int
) -> tuple[Tensor, ...]:
    return tuple(
        like(x) if need >> place & 1 else x.new_empty(*x.shape[:-1], 0)
        for place, x in enumerate((q, k, v))
    )


_KERNELS = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_batched_backward": _attention_batched_backward,
    "attention_out": _attention_out,
    "merge": run_merge,
}
_FAKES = {
    "attention": _attention_fake,
    "attention_kernel": _attention_fake,
    "attention_backward": _attention_backward_fake,
    "attention_backward_kernel": _attention_backward_fake,
    "attention_batched_backward": _attention_batched_backward_fake,
    "attention_out": _attention_out_fake,
    "merge": _merge_fake,
    "plain": _plain_fake,
    "plain_backward": _plain_backward_fake,
}
if not has_kernels():
    _KERNELS["attention_kernel"] = _attention_kernel
    _KERNELS["attention_backward_kernel"] = _attention_backward_kernel
if torch.version.cuda is not None:
    announce()
for _key in ("CPU", "CUDA"):
    for _name, _kernel in _KERNELS.items():
        library.impl(_name, _kernel, _key)
    for _name in ("attention_kernel", "attention_backward_kernel", "plain", "plain_backward"):
        library.impl(_name, torch.library.fallthrough_kernel, f"Autograd{_key}")
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"fulmen::{_name}", _fake, lib=library)
