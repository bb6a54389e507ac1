# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators of the namespace fulmen, with kernels for CPU and CUDA and for fake tensors.

    attention(arrays, settings, outputs) -> (o, lse or None, stats or None)
    attention_backward(do, dlse, o, stats, arrays, settings, need) -> (dq, dk, dv, dbias, dsinks)
    attention_out(arrays, settings, out=, lse=) -> ()
    merge(os, lses, sinks, layout, out_dtype) -> (o, lse)

The Autograd kernels are in autograd.py and merging.py. Lengths are SymInt or lie in tensors: one
graph holds for any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import (
    WITH_LSE,
    accumulator,
    forward_results,
    like,
    lse_like,
    run_backward,
    run_forward,
    run_merge,
    split,
)
from .settings import ARRAYS_SCHEMA, DIFFERENTIABLE, SETTINGS_SCHEMA

library = torch.library.Library("fulmen", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

library.define(
    f"attention({ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, int outputs) -> (Tensor, Tensor?, Tensor?)",
    tags=_TAGS,
)
library.define(
    f"attention_backward(Tensor? do, Tensor? dlse, Tensor o, Tensor stats, {ARRAYS_SCHEMA}, "
    f"{SETTINGS_SCHEMA}, bool[5] need) -> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)",
    tags=_TAGS,
)
library.define(
    f"attention_out({ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, *, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    tags=_TAGS,
)
library.define(
    "merge(Tensor[] os, Tensor[] lses, Tensor? sinks, str layout, ScalarType? out_dtype) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)

# The same with a tensor in every place, empty where it is not needed: what the loop that torch runs
# for is_grads_batched=True can stack.
library.define(
    "attention_batched_backward(Tensor? do, Tensor? dlse, Tensor o, Tensor stats, "
    f"{ARRAYS_SCHEMA}, {SETTINGS_SCHEMA}, bool[5] need) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

attention = torch.ops.fulmen.attention.default
attention_backward = torch.ops.fulmen.attention_backward.default
attention_batched_backward = torch.ops.fulmen.attention_batched_backward.default
attention_out = torch.ops.fulmen.attention_out.default
merge = torch.ops.fulmen.merge.default


def _attention(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return run_forward(tuple(arrays), settings, outputs)


def _attention_fake(*args: Any) -> tuple[Any, ...]:
    arrays, settings, (outputs,) = split(args)
    return forward_results(arrays.q, arrays.v, settings, outputs)


def _attention_backward(do: Any, dlse: Any, o: Tensor, stats: Tensor, *args: Any) -> Any:
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


for _name, _kernel, _fake in (
    ("attention", _attention, _attention_fake),
    ("attention_backward", _attention_backward, _attention_backward_fake),
    (
        "attention_batched_backward",
        _attention_batched_backward,
        _attention_batched_backward_fake,
    ),
    ("attention_out", _attention_out, _attention_out_fake),
    ("merge", run_merge, _merge_fake),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"fulmen::{_name}", _fake, lib=library)
