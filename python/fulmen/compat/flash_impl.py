# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen as the flash backend inside torch's scaled_dot_product_attention.

    fulmen.compat.flash_impl.register()
    torch.nn.attention.activate_flash_attention_impl("fulmen")

torch (2.11 and later) lets one take the place of its own flash operators. What its selector sends
to the flash backend then comes here from every call site, nn.MultiheadAttention, torch.ops.aten and
compiled programs included. The selector still decides: on a GPU float16 and bfloat16 without a mask
go there, on the CPU float masks too. `torch.nn.attention.restore_flash_attention_impl()` undoes it.
Dropout, pages and the debug mask of these operators are refused by name; fulmen.compat.sdpa has
dropout and every mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.ops import WITH_LSE, Arrays, lse_like, o_like, run_backward, run_forward
from .._torch.reference import accumulator
from ..errors import UnsupportedError
from ..options import Settings, settings_of

__all__ = ["register"]


def register(name: str = "fulmen") -> None:
    """Makes `activate_flash_attention_impl(name)` known to torch; activates nothing.

    Args:
        name: how activate_flash_attention_impl asks for it.

    Raises:
        fulmen.UnsupportedError: this torch has no such registry.
    """
    registry = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if registry is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; "
            "2.11 has, and fulmen.compat.sdpa.enable() works with either"
        )
    registry(name, register_fn=_Handle)


class _Handle:
    """Keeps the operators in place; torch calls remove()."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        for operator, kernel in _KERNELS.items():
            key = "CPU" if "for_cpu" in operator else "CUDA"
            self.library.impl(operator, kernel, key)

    def remove(self) -> None:
        self.library = None


def _refuse_what_is_absent(dropout_p: float = 0.0, debug: bool = False, pages: Any = None) -> None:
    for is_asked, what, instead in (
        (dropout_p > 0, f"dropout_p={dropout_p}", "fulmen.compat.sdpa has dropout"),
        (debug, "return_debug_mask=True", "the probabilities are never made"),
        (pages is not None, "a block_table", "fulmen.attention_varlen takes contiguous keys"),
    ):
        if is_asked:
            raise UnsupportedError(f"{what} is not read by fulmen as torch's flash impl; {instead}")


def _settings(**options: Any) -> Settings:
    settings: Settings = settings_of(tuple(options.items()))
    return settings


def _square(scale: float | None, is_causal: bool) -> Settings:
    return _settings(scale=scale, causal=is_causal, alignment="top_left")


def _forward(arrays: Any, settings: Settings, out: Any = None) -> tuple[Tensor, Tensor]:
    out = o_like(arrays.q, arrays.v, None) if out is None else out
    results = out, lse_like(arrays.q, settings.layout.code), None
    return run_forward(arrays, settings, None, WITH_LSE, results)[:2]


def _gradients(do: Tensor, o: Tensor, lse: Tensor, arrays: Any, settings: Settings) -> Any:
    if torch.are_deterministic_algorithms_enabled():
        settings = settings.replaced(deterministic=True)
    need = (True, True, True, False, False)
    return run_backward(do, None, o, lse, arrays, settings, need)[:3]


def _no_lots(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and the debug mask of a call without dropout."""
    state = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    return state, state.new_zeros(()), q.new_empty(0)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _refuse_what_is_absent(dropout_p, return_debug_mask)
    o, lse = _forward(Arrays(q, k, v), _square(scale, is_causal))
    return o, lse, None, None, q.shape[2], k.shape[2], *_no_lots(q)


def _sdpa_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Any,
    cu_kv: Any,
    max_q: int,
    max_kv: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> Any:
    _refuse_what_is_absent(dropout_p)
    return _gradients(do, o, lse, Arrays(q, k, v), _square(scale, is_causal))


def _cpu_mask(arrays: Any, attn_mask: Any) -> Any:
    if attn_mask is None:
        return arrays
    name = "mask" if attn_mask.dtype == torch.bool else "bias"
    return arrays._replace(**{name: attn_mask})


def _sdpa_for_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    _refuse_what_is_absent(dropout_p)
    batch, heads, rows, _ = q.shape  # compiled programs rely on this order in memory
    lse = q.new_empty((batch, rows, heads), dtype=accumulator(q.dtype)).transpose(1, 2)
    results = o_like(q, v, None), lse, None
    arrays = _cpu_mask(Arrays(q, k, v), attn_mask)
    return run_forward(arrays, _square(scale, is_causal), None, WITH_LSE, results)[:2]


def _sdpa_for_cpu_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    arrays = _cpu_mask(Arrays(q, k, v), attn_mask)
    return _gradients(do, o, lse, arrays, _square(scale, is_causal))


def _flash_settings(
    cu_q: Any, max_q: int, max_kv: int, is_causal: bool, scale: Any, left: Any, right: Any
) -> Settings:
    """(batch, row, head, dim), or packed (row, head, dim), as flash-attn has them."""
    packed = {} if cu_q is None else {"max_q": max_q, "max_kv": max_kv}
    return _settings(
        scale=scale,
        causal=is_causal,
        window=(left, right),
        layout="bshd" if cu_q is None else "shd",
        **packed,
    )


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Any,
    cu_kv: Any,
    max_q: int,
    max_kv: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    out: Any = None,
) -> Any:
    _refuse_what_is_absent(dropout_p, return_debug_mask, block_table)
    arrays = Arrays(
        q, k, v, alibi_slopes=alibi_slopes, kv_lengths=seqused_k, cu_q=cu_q, cu_kv=cu_kv
    )
    settings = _flash_settings(
        cu_q, max_q, max_kv, is_causal, scale, window_size_left, window_size_right
    )
    return (*_forward(arrays, settings, out), *_no_lots(q))


def _flash_into(out: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    lse: Tensor = _flash(*arguments, **keywords, out=out)[1]
    return lse


def _flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Any,
    cu_kv: Any,
    max_q: int,
    max_kv: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    _refuse_what_is_absent(dropout_p)
    settings = _flash_settings(
        cu_q, max_q, max_kv, is_causal, scale, window_size_left, window_size_right
    )
    return _gradients(do, o, lse, Arrays(q, k, v, cu_q=cu_q, cu_kv=cu_kv), settings)


_KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_for_cpu_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_into,
    "_flash_attention_backward": _flash_backward,
}
