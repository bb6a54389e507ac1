# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""flash_attn.flash_attn_interface: FlashAttention 2's functions, and those below its autograd.

Ring attention and context parallelism call the latter: a forward pass that records nothing and
returns (o, lse, S_dmask, rng_state), and a backward pass that writes into dq, dk, dv from an o and
an lse that may be those of all parts together. rng_state is fulmen's (seed, offset), int64[2]. lse
of a row that sees nothing is -inf, where the original has +inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention
from .._torch.ops import Arrays, run_backward
from ..errors import UnsupportedError
from ..options import settings_of
from . import flash_attn as public
from .dropped import block_keys, draw, dropped_probabilities
from .flash_attn import *  # noqa: F403  what the original module shows too
from .flash_shared import bound, check_offsets, options_of

__all__ = [
    "USE_TRITON_ROCM",
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]
__all__ += [name for name in public.__all__ if name.startswith("flash_attn_")]

USE_TRITON_ROCM = False  # callers ask which kernels compute: not that project's for ROCm


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys in a tile of FlashAttention 2: the scale of S_dmask follows from it."""
    return block_keys(device, head_dim, is_dropout, is_causal)


def _run(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, with_s: bool, **options: Any) -> Any:
    """(o, lse, S_dmask or None, rng_state)."""
    rng = draw(q) if dropout_p > 0 else torch.zeros(2, dtype=torch.int64, device=q.device)
    options = options_of(dropout_p=dropout_p, **options)
    with torch.no_grad():
        if dropout_p > 0:
            options["rng"] = rng
        o, lse = attention(q, k, v, return_lse=True, **options)
        s = dropped_probabilities(q, k, options) if with_s and dropout_p > 0 else None
    return o, lse, s, rng


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Any, Tensor]:
    """(o, lse (batch, head, q_row), S_dmask or None, rng_state); records no gradient."""
    found: tuple[Tensor, Tensor, Any, Tensor] = _run(
        q, k, v, dropout_p, return_softmax, layout="bshd", scale=softmax_scale, causal=causal,
        window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return found


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Any, Tensor]:
    """(o, lse (head, total_q), S_dmask or None, rng_state); records no gradient."""
    del zero_tensors  # rows past the last offset are 0 always
    check_offsets(cu_seqlens_q, cu_seqlens_k)
    for name, x in (("block_table", block_table), ("leftpad_k", leftpad_k)):
        if x is not None:
            raise UnsupportedError(
                f"{name} is given; fulmen takes contiguous keys there: flash_attn_varlen_func and "
                "flash_attn_with_kvcache take caches"
            )
    found: tuple[Tensor, Tensor, Any, Tensor] = _run(
        q, k, v, dropout_p, return_softmax, layout="shd", scale=softmax_scale, causal=causal,
        window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        cu_q=cu_seqlens_q, cu_kv=cu_seqlens_k, max_q=bound(max_seqlen_q),
        max_kv=bound(max_seqlen_k), kv_lengths=seqused_k,
    )  # fmt: skip
    return found


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, into: Any,
    deterministic: bool, rng: Any, inputs: dict[str, Any], options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Writes the gradients; returns rowsum(dout * out) with the axes of lse."""
    if options["dropout_p"] > 0:
        if rng is None:
            raise UnsupportedError("dropout_p > 0 needs rng_state, of the forward pass")
        inputs["rng"], options["rng"] = rng, (0, 0)
    slopes = options.pop("alibi_slopes")
    settings = settings_of(
        tuple({**options, "deterministic": deterministic}.items()), "cu_q" in inputs
    )
    arrays = Arrays(q, k, v, alibi_slopes=slopes, **inputs)
    need = (*(x is not None for x in into), False, False)
    with torch.no_grad():
        found = run_backward(dout, None, out, lse.contiguous(), tuple(arrays), settings, need)
        for x, gradient in zip(into, found):
            if x is not None:
                x.copy_(gradient)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv, those that are given; returns softmax_d (batch, head, q_row)."""
    options = options_of(
        layout="bshd", scale=softmax_scale, causal=causal, softcap=softcap, dropout_p=dropout_p,
        window=(window_size_left, window_size_right), alibi_slopes=alibi_slopes,
    )  # fmt: skip
    into = (dq, dk, dv)
    return _gradients(dout, q, k, v, out, softmax_lse, into, deterministic, rng_state, {}, options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv, those that are given; returns softmax_d (head, total_q)."""
    del zero_tensors
    check_offsets(cu_seqlens_q, cu_seqlens_k)
    options = options_of(
        layout="shd", scale=softmax_scale, causal=causal, softcap=softcap, dropout_p=dropout_p,
        window=(window_size_left, window_size_right), alibi_slopes=alibi_slopes,
        max_q=bound(max_seqlen_q), max_kv=bound(max_seqlen_k),
    )  # fmt: skip
    into, inputs = (dq, dk, dv), {"cu_q": cu_seqlens_q, "cu_kv": cu_seqlens_k}
    return _gradients(
        dout, q, k, v, out, softmax_lse, into, deterministic, rng_state, inputs, options
    )


# The original puts its operators behind the dispatcher under these names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _function(name: str, function: Any, num_before: int, num_behind: int = 0) -> Any:
    """One of the original's autograd functions: a class with `apply`, which is `function`.

    Args:
        name: of the class.
        function: the public one.
        num_before: how many arguments come before dropout_p.
        num_behind: how many come between return_softmax and is_grad_enabled.
    """
    num_own = num_before + 8 + num_behind  # up to return_softmax, and block_table

    def apply(*arguments: Any) -> Any:
        *own, is_grad_enabled = arguments if len(arguments) > num_own else (*arguments, True)
        with torch.set_grad_enabled(is_grad_enabled and torch.is_grad_enabled()):
            return function(*own)

    apply.__doc__ = f"{function.__name__}, with its arguments in order; then is_grad_enabled."
    shown = {"apply": staticmethod(apply), "__doc__": f"FlashAttention 2's {name}.",
             "__module__": __name__}  # fmt: skip
    return type(name, (), shown)


FlashAttnFunc = _function("FlashAttnFunc", public.flash_attn_func, 3)
FlashAttnQKVPackedFunc = _function("FlashAttnQKVPackedFunc", public.flash_attn_qkvpacked_func, 1)
FlashAttnKVPackedFunc = _function("FlashAttnKVPackedFunc", public.flash_attn_kvpacked_func, 2)
FlashAttnVarlenFunc = _function("FlashAttnVarlenFunc", public.flash_attn_varlen_func, 7, 1)
FlashAttnVarlenQKVPackedFunc = _function(
    "FlashAttnVarlenQKVPackedFunc", public.flash_attn_varlen_qkvpacked_func, 3
)
FlashAttnVarlenKVPackedFunc = _function(
    "FlashAttnVarlenKVPackedFunc", public.flash_attn_varlen_kvpacked_func, 6
)
