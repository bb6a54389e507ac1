# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The shortest way: q, k and v alone, eager, nothing watching. Most calls of most models.

What follows from the options is made once and remembered; each call then makes its results and
goes to the library, forward and backward. Whatever does not fit, an error included, is left to
eager.py, which takes every argument and says what is wrong.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .._library import library
from .._nvrtc import announce
from ..kinds import CURRENT_STREAM
from . import guards
from .eager import gradients_of
from .kernels import O_ONLY, STATS_ONLY, accumulator, like, lse_like, ready_of, run_forward
from .settings import NUM_ARRAYS, checked, settings_of

_NO_MORE = (None,) * (NUM_ARRAYS - 3)
_MOST_CALLS = 1024
_EVERY = (False, True, True, True)  # needs_input_grad of (call, q, k, v)


class PlainCall:
    """One combination of options, which the library keeps: what a call says before its arrays."""

    __slots__ = (
        *("__weakref__", "backward", "before", "forward", "is_common", "ready", "settings"),
    )

    def __init__(self, *keywords: Any) -> None:
        self.settings = settings_of(*keywords)
        self.ready = numbers, layout = ready_of(self.settings, False)
        self.is_common = layout.name == "bhsd"
        found = library()
        self.forward, self.backward = found.attend, found.attend_backward
        options = found.keep_options(*numbers, layout.rows_before_heads, layout.rank)
        weakref.finalize(self, found.drop_options, options).atexit = False
        self.before = options, CURRENT_STREAM

    def attend(self, q: Tensor, k: Tensor, v: Tensor, with_stats: bool) -> tuple[Tensor, Any]:
        """o and, where asked for, stats."""
        if not q.is_cpu:
            announce()
        try:
            if not (q.is_neg() or k.is_neg() or v.is_neg()):
                o, stats = torch.empty_like(q), self._stats_of(q) if with_stats else None
                if self.forward(*self.before, q, k, v, o, stats) == 0:
                    return o, stats
        except Exception:
            pass  # the long way says it in one sentence
        checked((q, k, v))
        outputs = STATS_ONLY if with_stats else O_ONLY
        o, _, stats = run_forward((q, k, v, *_NO_MORE), self.settings, outputs, None, self.ready)
        return o, stats

    def _stats_of(self, q: Tensor) -> Tensor:
        if not self.is_common:
            return lse_like(q, self.settings.layout, 2)
        batch, heads, rows, _ = q.shape  # quicker than its slice, or size() four times
        if q.dtype is torch.float32:
            return q.new_empty(batch, heads, rows, 2)
        return q.new_empty(batch, heads, rows, 2, dtype=accumulator(q.dtype))

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, o: Any, stats: Any, do: Tensor) -> Any:
        """(dq, dk, dv), or None where the long way must say what is wrong."""
        if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        else:
            dq, dk, dv = like(q), like(k), like(v)
        try:
            self.backward(*self.before, q, k, v, o, stats, do, dq, dk, dv)
        except Exception:
            return None
        return None, dq, dk, dv


plain_calls: dict[tuple[Any, ...], PlainCall] = {}  # asked on every call: quicker than lru_cache


def plain_call(keywords: tuple[Any, ...]) -> PlainCall:
    """The call with these keywords of `fulmen.attention`, made and remembered."""
    scale, softcap, causal, alignment, window, layout, *how, precision = keywords
    call = PlainCall(
        scale, softcap, causal, alignment, window, 0, 0, 0.0, None, None, layout, *how, None,
        precision, False,
    )  # fmt: skip
    if len(plain_calls) >= _MOST_CALLS:
        plain_calls.clear()
    plain_calls[keywords] = call
    return call


def plain_attention(call: PlainCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """o, differentiable where one of the three requires it."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _apply(call, q, k, v)
    return call.attend(q, k, v, False)[0]


class PlainAttention(torch.autograd.Function):
    """(call, q, k, v) -> o."""

    @staticmethod
    def forward(ctx: Any, call: PlainCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, stats = call.attend(q, k, v, True)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, stats)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, stats = ctx.saved_tensors
        call, need = ctx.call, ctx.needs_input_grad
        if need == _EVERY and not (do.is_neg() or guards.is_backward_watched(do)):
            found = call.gradients(q, k, v, o, stats, do)
            if found is not None:
                return found
        full = (q, k, v, *_NO_MORE)
        wanted = [*need[1:], False, False]
        found = gradients_of(do, None, o, stats, full, call.settings, call.ready, wanted)
        return (None, *found[:3])


# Function.apply without its way into functorch, which the guards have ruled out: 4 us a call.
_apply = super(torch.autograd.Function, PlainAttention).apply
