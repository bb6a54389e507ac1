# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The short way: eager mode with nothing watching. One library call, or one autograd.Function.

The operators compute the same with the same kernels; they cost 20 microseconds a call and more,
which is what this file is for (docs: PyTorch, overhead). plain.py is shorter still.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import guards
from .autograd import AttentionBackward, batched_gradients
from .kernels import (
    O_ONLY,
    STATS_ONLY,
    WITH_LSE,
    WITH_STATS,
    Ready,
    ready_of,
    run_backward,
    run_forward,
)
from .settings import DIFFERENTIABLE, NUM_ARRAYS, Settings, settings_of


@lru_cache(maxsize=1024)
def remembered(*keywords: Any) -> tuple[Settings, Ready | None]:
    """Settings from the keywords of a call, and the numbers that follow from them."""
    settings = settings_of(*keywords)
    if settings.dropout_p > 0:
        return settings, None  # the numbers hold the lots
    return settings, ready_of(settings, keywords[-1])


def eager_attention(
    arrays: tuple[Any, ...],
    settings: Settings,
    ready: Ready | None,
    return_lse: bool,
) -> Any:
    """o, or (o, lse), of plain tensors outside of any mode or transform; arrays may end with v."""
    if torch.is_grad_enabled() and _requires_grad(arrays):
        return _apply(settings, ready, return_lse, *arrays)
    full = arrays if len(arrays) == NUM_ARRAYS else arrays + _NO_MORE
    o, lse, _ = run_forward(full, settings, WITH_LSE if return_lse else O_ONLY, None, ready)
    return (o, lse) if return_lse else o


def _requires_grad(arrays: tuple[Any, ...]) -> bool:
    q, k, v = arrays[:3]
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    if len(arrays) == 3:
        return False
    bias, sinks = arrays[3], arrays[6]
    return bool(
        (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)
    )


def gradients_of(
    do: Any,
    dlse: Any,
    o: Any,
    stats: Any,
    arrays: tuple[Any, ...],
    settings: Settings,
    ready: Ready | None,
    need: Any,
) -> Any:
    """(dq, dk, dv, dbias, dsinks) in a backward pass, by the way that suits who is watching it."""
    if guards.is_batched_gradient(do, dlse):
        return batched_gradients(do, dlse, o, stats, arrays, settings, need)
    if torch.is_grad_enabled() or guards.is_watched():
        return AttentionBackward.apply(settings, need, do, dlse, o, stats, *arrays)
    return run_backward(do, dlse, o, stats, arrays, settings, need, ready)


class EagerAttention(torch.autograd.Function):
    """(settings, ready, return_lse, *arrays) -> o, or (o, lse); arrays may end with v."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, ready: Ready | None, return_lse: bool, *arrays: Any
    ) -> Any:
        full = arrays if len(arrays) == NUM_ARRAYS else arrays + _NO_MORE
        outputs = WITH_STATS if return_lse else STATS_ONLY
        o, lse, stats = run_forward(full, settings, outputs, None, ready)
        ctx.options = settings, ready
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, o, stats)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        *arrays, o, stats = ctx.saved_tensors
        num_given = len(arrays)
        if do is None and dlse is None:
            return (None,) * (3 + num_given)
        settings, ready = ctx.options
        full = (*arrays, *_NO_MORE[: NUM_ARRAYS - num_given])
        wanted = ctx.needs_input_grad[3:]
        if num_given == 3:
            need = [*wanted, False, False]
        else:
            need = [wanted[place] for place in DIFFERENTIABLE]
        found = gradients_of(do, dlse, o, stats, full, settings, ready, need)
        dq, dk, dv, dbias, dsinks = found
        if num_given == 3:
            return None, None, None, dq, dk, dv
        return (None, None, None, dq, dk, dv, dbias, None, None, dsinks, *_NO_MORE[4:])


_NO_MORE = (None,) * (NUM_ARRAYS - 3)

# Function.apply without its way into functorch, which the guards have ruled out: 4 us a call.
_apply = super(torch.autograd.Function, EagerAttention).apply
