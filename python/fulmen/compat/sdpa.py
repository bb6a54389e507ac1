# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention, computed by fulmen.

    from fulmen.compat.sdpa import scaled_dot_product_attention        one call site
    with fulmen.compat.sdpa.replaced(): ...                            a whole model, for a while
    fulmen.compat.sdpa.enable()                                        a whole process

Signature and meaning are torch's: is_causal is aligned top-left, a boolean mask is True where a
query may look, a float mask is added, dropout acts whenever dropout_p > 0, a row that sees nothing
gives 0 (torch >= 2.5). What fulmen cannot do goes to torch with one warning for each reason, or
with strict=True is an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from .. import attention, attention_varlen
from .._torch.ops import FLOATING
from .._torch.subclasses import causal_alignment
from ..errors import ArgumentError, Error, UnsupportedError

__all__ = ["disable", "enable", "is_enabled", "replaced", "scaled_dot_product_attention"]

_original = functional.scaled_dot_product_attention
_DEVICES = ("cpu", "cuda")
_MAX_DIM_QK, _MAX_DIM_V = 576, 512

_warned: set[str] = set()
_is_strict = False


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query key^T * scale + attn_mask) value.

    Args:
        query: (..., head, q_row, dim).
        key: (..., head, kv_row, dim).
        value: (..., head, kv_row, dim_v). Leading axes broadcast. Or all three are jagged nested
            tensors (batch, head, row, dim), whose sequences have rows of their own number.
        attn_mask: boolean (True: look) or float (added; may require grad); broadcasts to
            (..., head, q_row, kv_row). Or a CausalBias of torch.nn.attention.bias.
        dropout_p: probability of dropping, applied whenever it is above 0.
        is_causal: query i sees keys 0 to i; not together with attn_mask.
        scale: None: 1 / sqrt(dim).
        enable_gqa: query may have a multiple of the heads of key and value.

    Raises:
        fulmen.UnsupportedError: strict mode, and fulmen cannot do it; the text says why.
        fulmen.ArgumentError: a CausalBias beside is_causal, which torch refuses too.

    >>> import torch
    >>> from fulmen.compat.sdpa import scaled_dot_product_attention
    >>> x = torch.ones(1, 2, 3, 4)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 3, 4])
    """
    if is_causal and causal_alignment(attn_mask) is not None:
        raise ArgumentError("attn_mask is a CausalBias and is_causal=True; the one replaces both")
    reason = _refusal(query, key, value, attn_mask, is_causal, enable_gqa)
    if reason is None:
        if torch.compiler.is_compiling():
            return _by_fulmen(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        try:
            return _by_fulmen(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except Error as error:
            reason = str(error)
    if _is_strict:
        raise UnsupportedError(f"scaled_dot_product_attention: {reason}")
    mask = _matrix(attn_mask, query.device)
    result: torch.Tensor = _original(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if reason not in _warned:  # after the call: torch may refuse it too, in its own words
        _warned.add(reason)
        warnings.warn(
            f"fulmen leaves scaled_dot_product_attention to torch: {reason}", stacklevel=2
        )
    return result


def _refusal(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, enable_gqa: bool
) -> str | None:
    """Why the call goes to torch; None: it does not."""
    arrays = ((query, "query"), (key, "key"), (value, "value"))
    is_jagged = query.layout is key.layout is value.layout is torch.jagged
    for x, name in arrays:
        if not is_jagged and (x.is_nested or x.layout is not torch.strided):
            return f"{name} is nested or sparse, and the three are not jagged alike"
        if x.dtype not in FLOATING:
            return f"{name} has dtype {x.dtype}"
        if x.device.type not in _DEVICES:
            return f"{name} is on {x.device.type}, not on cpu or cuda"
        if x.dim() < 2:
            return f"{name} has {x.dim()} axes"
    if is_jagged:
        if attn_mask is not None:
            return "attn_mask is given with jagged tensors"
        if not all(x.dim() == 4 and getattr(x, "_ragged_idx", 0) == 2 for x, _ in arrays):
            return "a jagged tensor is not (batch, head, row, dim) with rows of own numbers"
        if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
            return "jagged tensors have different numbers of heads and enable_gqa is False"
    if query.shape[-1] > _MAX_DIM_QK or value.shape[-1] > _MAX_DIM_V or value.shape[-1] < 1:
        return (
            f"head dimensions are {query.shape[-1]} and {value.shape[-1]}; fulmen has up to "
            f"{_MAX_DIM_QK} and 1 to {_MAX_DIM_V}"
        )
    if attn_mask is not None and is_causal:
        return "attn_mask and is_causal are both given"
    if enable_gqa and (key.dim() < 3 or key.shape[-3] != value.shape[-3]):
        return "enable_gqa with different numbers of key and value heads"
    return None


def _matrix(attn_mask: Any, device: Any) -> Any:
    """A CausalBias as a boolean tensor: torch would look for its own function, which may be
    replaced; any other mask as it is."""
    alignment = causal_alignment(attn_mask)
    if alignment is None:
        return attn_mask
    rows, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
    whole = torch.ones(rows, keys, dtype=torch.bool, device=device)
    return whole.tril(0 if alignment == "top_left" else keys - rows)


def _by_fulmen(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    if query.is_nested:
        return _of_jagged(query, key, value, dropout_p, is_causal, scale)
    lead = query.shape[:-2]
    if not (
        query.dim() == 4
        and key.dim() == 4
        and value.dim() == 4
        and key.shape[0] == lead[0]
        and value.shape[0] == lead[0]
        and (enable_gqa or (key.shape[1] == lead[1] and value.shape[1] == lead[1]))
    ):
        lead, query, key, value, attn_mask = _four_axes(query, key, value, attn_mask, enable_gqa)
    mask = bias = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool or causal_alignment(attn_mask) is not None:
            mask = attn_mask
        else:
            bias = attn_mask
    o = attention(
        query,
        key,
        value,
        scale=scale,
        causal=is_causal,
        alignment="top_left",
        mask=mask,
        bias=bias,
        dropout_p=dropout_p,
    )
    return o if len(lead) == 2 else o.reshape(*lead, *o.shape[-2:])


def _of_jagged(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> Any:
    """Jagged tensors (batch, head, row, dim), whose values() are packed sequences."""
    o = attention_varlen(
        query.values(),
        key.values(),
        value.values(),
        query.offsets(),
        key.offsets(),
        layout="hsd",
        scale=scale,
        causal=is_causal,
        alignment="top_left",
        dropout_p=dropout_p,
        q_lengths=query.lengths(),
        kv_lengths=key.lengths(),
    )
    return torch.nested.nested_tensor_from_jagged(
        o, query.offsets(), lengths=query.lengths(), jagged_dim=2
    )


def _four_axes(
    query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """Leading axes broadcast and folded into (batch, head), as matmul would broadcast them."""
    arrays = (query, key, value)
    if enable_gqa:
        outer = torch.broadcast_shapes(*(x.shape[:-3] for x in arrays))
        arrays = tuple(x.expand(*outer, *x.shape[-3:]) for x in arrays)
    else:
        outer = torch.broadcast_shapes(*(x.shape[:-2] for x in arrays))
        arrays = tuple(x.expand(*outer, *x.shape[-2:]) for x in arrays)
    lead = arrays[0].shape[:-2]
    is_array = attn_mask is not None and causal_alignment(attn_mask) is None
    if is_array and len(lead) > 2 and attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:])
        attn_mask = attn_mask.reshape(-1, *attn_mask.shape[-3:])
    folded = []
    for x in arrays:
        padded = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if x.dim() < 4 else x
        folded.append(padded.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else padded)
    return (lead, *folded, attn_mask)


_places: list[tuple[Any, str]] = []


def enable(*, strict: bool = False) -> list[str]:
    """Replaces torch's function in torch.nn.functional and in every module that imported it.

    Threads started before and after see it; so does torch.compile, which forgets what it compiled
    before. Not reached: nn.MultiheadAttention and TransformerEncoderLayer in eval mode without
    gradients (their own fused path), torch.ops.aten, torch.jit.script.

    Args:
        strict: what fulmen cannot do is an error instead of a warning and torch's result.

    Returns:
        The places, as "module.name".
    """
    global _is_strict  # noqa: PLW0603  one switch for the process, as the function itself is
    _is_strict = strict
    if not _places:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or names is globals():
                continue
            for name, found in list(names.items()):
                if found is _original:
                    _places.append((module, name))
        for module, name in _places:
            setattr(module, name, scaled_dot_product_attention)
        _forget_compiled()
    return [f"{module.__name__}.{name}" for module, name in _places]


def disable() -> None:
    """Undoes `enable`, in the same places."""
    global _is_strict  # noqa: PLW0603
    _is_strict = False
    if _places:
        for module, name in _places:
            if getattr(module, name, None) is scaled_dot_product_attention:
                setattr(module, name, _original)
        _places.clear()
        _forget_compiled()


def is_enabled() -> bool:
    """Whether torch's function is replaced."""
    return bool(_places)


@contextmanager
def replaced(*, strict: bool = False) -> Iterator[list[str]]:
    """`enable` for the body of a with statement; nests.

    >>> import torch
    >>> from fulmen.compat import sdpa
    >>> with sdpa.replaced():
    ...     x = torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)
    """
    before, strict_before = is_enabled(), _is_strict
    places = enable(strict=strict)
    try:
        yield places
    finally:
        if before:
            enable(strict=strict_before)
        else:
            disable()


def _forget_compiled() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
