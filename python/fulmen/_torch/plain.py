# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The shortest way: q, k and v alone, eager, nothing watching. Most calls of most models.

The library keeps the options under a number and has kernels in PyTorch's dispatcher
(src/ffi/torch_kernels.cpp): one for calls that record nothing, and a pair behind PyTorch's own
attention node, whose backward pass then needs no Python. What this way cannot do, an error
included, is left to eager.py, which takes every argument and says what is wrong.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import library
from . import operators
from .eager import eager_attention, gradients_of
from .kernels import Ready, ready_of
from .settings import NUM_ARRAYS, Settings, checked, settings_of


class PlainCall(NamedTuple):
    """One combination of options and the number under which the library keeps it."""

    number: int
    settings: Settings
    ready: Ready


# Asked on every call: quicker than lru_cache.
plain_calls: dict[tuple[Any, ...], PlainCall] = {}
_by_number: dict[int, PlainCall] = {}
_lock = threading.Lock()

_unrecorded = torch.ops.fulmen.plain.default._op


def plain_call(keywords: tuple[Any, ...]) -> PlainCall | None:
    """The call with these keywords of `fulmen.attention`, made and remembered for good.

    None where the library keeps no more, or has no kernels here.
    """
    scale, softcap, causal, alignment, window, layout, *how, precision = keywords
    with _lock:
        if keywords in plain_calls or not operators.has_kernels():
            return plain_calls.get(keywords)
        every = (
            *(scale, softcap, causal, alignment, window, 0, 0, 0.0, None, None, layout, *how),
            *(None, precision, False),
        )
        settings = settings_of(*every)
        ready = numbers, where = ready_of(settings, False)
        number = library().keep_options(*numbers, where.rows_before_heads, where.rank)
        if number == 0:
            return None
        call = plain_calls[keywords] = _by_number[number] = PlainCall(number, settings, ready)
    return call


def plain_attention(call: PlainCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """o, differentiable where one of the three requires it."""
    records = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    try:
        if q.device == k.device == v.device:  # else the dispatcher asks the device of any of them
            if records:
                return operators.node(q, k, v, None, call.number, True, False)[0]
            return _unrecorded(q, k, v, call.number)
    except RuntimeError:  # what the kernels raise; a checkpoint that has all it needs raises others
        pass  # the long way says it in one sentence
    checked((q, k, v))
    return eager_attention((q, k, v), call.settings, call.ready, False)


def _derivable_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, options: int, need: int
) -> tuple[Tensor, ...]:
    call = _by_number[options]
    wanted = [*(bool(need >> place & 1) for place in range(3)), False, False]
    full = (q, k, v, *(None,) * (NUM_ARRAYS - 3))
    found = gradients_of(do, None, o, stats, full, call.settings, call.ready, wanted)
    return tuple(q.new_empty(0) if x is None else x for x in found[:3])


operators.library.impl("plain_derivable", _derivable_gradients, "CompositeImplicitAutograd")
