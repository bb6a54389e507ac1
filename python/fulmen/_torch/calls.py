# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The public calls on tensors: which way each goes.

`fulmen.functional` passes its keywords on; what they mean is documented there. torch.compile traces
these functions down to the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, Error, UnsupportedError
from . import autograd, guards, merging, operators
from .eager import eager_attention, remembered
from .kernels import O_ONLY, WITH_LSE, WITH_STATS
from .plain import plain_attention, plain_call, plain_calls
from .settings import (
    DIFFERENTIABLE,
    Arrays,
    Settings,
    check_addends,
    checked,
    rng_of,
    settings_of,
    split_mask,
    tensor_of,
)


def attention(
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    mask: Any,
    bias: Any,
    alibi_slopes: Any,
    softcap: Any,
    sinks: Any,
    q_lengths: Any,
    kv_lengths: Any,
    dropout_p: Any,
    rng: Any,
    layout: Any,
    return_lse: bool,
    out: Any,
    out_dtype: Any,
    backend: Any,
    implementation: Any,
    deterministic: Any,
    batch_invariant: Any,
    precision: Any,
    stream: Any,
    cu_q: Any = None,
    cu_kv: Any = None,
    max_q: Any = None,
    max_kv: Any = None,
) -> Any:
    """o, or (o, lse): `fulmen.attention` and, with cu_q and cu_kv, `fulmen.attention_varlen`.

    The public signatures hold the defaults.
    """
    if type(window) is list:
        window = tuple(window)
    if (
        mask is bias is alibi_slopes is sinks is q_lengths is kv_lengths is cu_q is cu_kv is rng
        is out is out_dtype is stream is None
        and not (return_lse or dropout_p)
        and guards.take_the_shortest_way(q, k, v)
    ):  # fmt: skip
        chosen = (
            scale, softcap, causal, alignment, window, layout, backend, implementation,
            deterministic or guards.is_deterministic(), batch_invariant, precision,
        )  # fmt: skip
        call = plain_calls.get(chosen) or plain_call(chosen)
        if call is not None:
            return plain_attention(call, q, k, v)
    if not (bias is alibi_slopes is sinks is None):
        check_addends(bias, alibi_slopes, sinks)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if stream is not None:
        raise UnsupportedError(
            "stream is given with PyTorch tensors; their work goes to torch's current stream: use "
            "torch.cuda.stream(...) and leave stream=None"
        )
    prefix, chunk, visible, counts = 0, 0, None, _NO_COUNTS
    if not (mask is q_lengths is kv_lengths is cu_q is None):
        given = (q_lengths, kv_lengths, cu_q, cu_kv)
        prefix, chunk, visible, counts = _structure(mask, given, q.device)
    keywords = (
        scale, softcap, causal, alignment, window, prefix, chunk, dropout_p, max_q, max_kv, layout,
        backend, implementation, deterministic, batch_invariant, out_dtype, precision,
        cu_q is not None,
    )  # fmt: skip
    watched = guards.is_watched() or out is not None or not guards.are_plain(q, k, v)
    if watched:
        settings = settings_of(*keywords)
    else:
        settings, ready = remembered(*keywords)
    if rng is not None or settings.dropout_p > 0:
        rng = rng_of(rng, settings.dropout_p, q.device)
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        q, k, v, bias = _autocast(device, q, k, v, bias)
    arrays: tuple[Any, ...] = (q, k, v)
    if watched or not (bias is alibi_slopes is sinks is rng is None and counts is _NO_COUNTS):
        arrays = (*arrays, bias, visible, alibi_slopes, sinks, *counts, rng)
    if watched:
        return _by_operator(Arrays(*arrays), settings, return_lse, out)
    try:
        return eager_attention(arrays, settings, ready, return_lse)
    except Error:
        checked(arrays)  # where it refuses too, its sentence says more
        raise


_NO_COUNTS = (None,) * 6


def _structure(mask: Any, given: tuple[Any, ...], device: Any) -> tuple[int, int, Any, Any]:
    """Prefix, chunk, boolean mask, and (lengths, offsets, ids) as tensors."""
    prefix, chunk, visible, q_ids, kv_ids = 0, 0, None, None, None
    if mask is not None:
        prefix, chunk, visible, q_ids, kv_ids = split_mask(mask, device)
    return prefix, chunk, visible, (*(tensor_of(x, device) for x in given), q_ids, kv_ids)


def merge(
    parts: Sequence[Any], *, sinks: Any = None, layout: str = "bhsd", out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """`fulmen.merge`, differentiable in every o, every lse and the sinks."""
    from .settings import torch_dtype

    pairs = [tuple(part)[:2] for part in parts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ArgumentError("parts is a list of pairs (o, lse), at least one")
    os, lses = [o for o, _ in pairs], [lse for _, lse in pairs]
    dtype = torch_dtype(out_dtype)
    if guards.is_transformed():
        return merging.Merge.apply(layout, dtype, sinks, *os, *lses)  # type: ignore[no-any-return]
    return operators.merge(os, lses, sinks, layout, dtype)  # type: ignore[no-any-return]


def _by_operator(arrays: Arrays, settings: Settings, return_lse: bool, out: Any) -> Any:
    checked(arrays)
    if out is not None:
        return _into(arrays, settings, return_lse, out)
    if guards.is_transformed():
        o, lse, _ = autograd.DualAttention.apply(settings, *arrays)
        return (o, lse) if return_lse else o
    records = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (arrays[place] for place in DIFFERENTIABLE)
    )
    outputs = WITH_STATS if records else WITH_LSE if return_lse else O_ONLY
    o, lse, _ = operators.attention(*arrays, *settings, outputs)
    return (o, lse) if return_lse else o


def _into(arrays: Arrays, settings: Settings, return_lse: bool, out: Any) -> Any:
    from ..arrays import check_out

    check_out(out, settings.out_dtype)
    lse = None
    if return_lse:
        from .kernels import lse_like

        lse = lse_like(arrays.q, settings.layout)
    operators.attention_out(*arrays, *settings._replace(out_dtype=None), out=out, lse=lse)
    return (out, lse) if return_lse else out


def _autocast(device: str, q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
    """q, k and v in autocast's dtype, as torch's own attention has them; lse stays float32."""
    checked((q, k, v))
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device)
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias
