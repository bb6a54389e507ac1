# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The shortest way: q, k and v alone, eager, nothing watching. Most calls of most models.

What follows from the options is made once and remembered; each call then makes its results and
goes to the library, forward and backward. Whatever does not fit, an error included, is left to
eager.py, which takes every argument and says what is wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._library import library
from .._nvrtc import announce
from ..kinds import CURRENT_STREAM, NO_STREAM
from . import guards
from .eager import gradients_of
from .kernels import O_ONLY, STATS_ONLY, like, lse_like, ready_of, run_forward
from .settings import NUM_ARRAYS, settings_of

_NO_MORE = (None,) * (NUM_ARRAYS - 3)


class PlainCall:
    """One combination of options: what the library reads before and between the arrays."""

    __slots__ = (
        *("backward", "before_cpu", "before_gpu", "forward", "is_common", "rank", "ready"),
        "settings",
    )

    def __init__(self, *keywords: Any) -> None:
        self.settings = settings_of(*keywords)
        self.ready = numbers, layout = ready_of(self.settings, False)
        self.rank = layout.rank
        self.is_common = layout.name == "bhsd"
        rows_first = layout.rows_before_heads
        self.before_cpu = (*numbers, NO_STREAM, 0, rows_first)
        self.before_gpu = (*numbers, CURRENT_STREAM, 0, rows_first)
        found = library()
        self.forward, self.backward = found.forward, found.backward

    def attend(self, q: Tensor, k: Tensor, v: Tensor, with_stats: bool) -> tuple[Tensor, Any]:
        """o and, where asked for, stats."""
        shape = q.shape
        if (
            len(shape) == k.dim() == v.dim() == self.rank
            and shape[-1] == v.shape[-1]
            and (q.is_contiguous() or q.stride(-1) == 1)
            and not (q.is_neg() or k.is_neg() or v.is_neg())
        ):
            before = self.before_cpu if q.is_cpu else self._on_gpu()
            o = torch.empty_like(q)
            stats = self._stats(q, shape) if with_stats else None
            try:
                self.forward(*before, q, k, v, *_NO_MORE, o, None, stats)
                return o, stats
            except Exception:
                pass  # the long way says it in one sentence
        outputs = STATS_ONLY if with_stats else O_ONLY
        o, _, stats = run_forward((q, k, v, *_NO_MORE), self.settings, outputs, None, self.ready)
        return o, stats

    def gradients(self, do: Tensor, o: Tensor, stats: Tensor, qkv: Any) -> Any:
        """(dq, dk, dv), or None where the long way must say what is wrong."""
        before = self.before_cpu if o.is_cpu else self.before_gpu
        found = [like(x) for x in qkv]
        try:
            self.backward(*before, *qkv, *_NO_MORE, o, None, stats, do, None, *found)
        except Exception:
            return None
        return found

    def _stats(self, q: Tensor, shape: Any) -> Tensor:
        if self.is_common and (q.dtype is torch.float32 or q.dtype is torch.float64):
            batch, heads, rows, _ = shape
            return q.new_empty(batch, heads, rows, 2)
        return lse_like(q, self.settings.layout, 2)

    def _on_gpu(self) -> tuple[float, ...]:
        announce()
        return self.before_gpu


@lru_cache(maxsize=1024)
def plain_call(
    scale: Any,
    softcap: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    layout: Any,
    backend: Any,
    implementation: Any,
    deterministic: Any,
    batch_invariant: Any,
) -> PlainCall:
    """The call with these keywords of `fulmen.attention`."""
    return PlainCall(
        scale, softcap, causal, alignment, window, 0, 0, 0.0, None, None, layout, backend,
        implementation, deterministic, batch_invariant, None, False,
    )  # fmt: skip


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
        call = ctx.call
        _, *need = ctx.needs_input_grad
        if (
            all(need)
            and not torch.is_grad_enabled()
            and not guards.is_batched_gradient(do, None)
            and not guards.is_watched()
            and not do.is_neg()
        ):
            found = call.gradients(do, o, stats, (q, k, v))
            if found is not None:
                return (None, *found)
        full = (q, k, v, *_NO_MORE)
        wanted = [*need, False, False]
        found = gradients_of(do, None, o, stats, full, call.settings, call.ready, wanted)
        return (None, *found[:3])


# Function.apply without its way into functorch, which the guards have ruled out: 4 us a call.
_apply = super(torch.autograd.Function, PlainAttention).apply
