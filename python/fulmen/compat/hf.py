# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen as an attention implementation of Hugging Face transformers.

    fulmen.compat.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulmen")

Two hooks. The mask hook keeps what a mask says as structure (nothing, a padding mask of keys, the
numbers of packed documents) where it is plain causal, bidirectional or sliding, so that no
quadratic mask is made; any other pattern, and the prefill of a static cache, become the dense mask
of transformers' own sdpa. The attention hook reads a mask of four axes as complete, and adds causal
(bottom-right) and the layer's window to all else.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from .. import attention, masks
from ..errors import ArgumentError, LibraryNotFound, UnsupportedError
from .flash_attn import same_words

__all__ = ["attention_hook", "mask_hook", "register"]


def register(name: str = "fulmen") -> None:
    """Makes `attn_implementation=name` known to transformers. May be called again.

    Args:
        name: how models ask for it.

    Raises:
        fulmen.LibraryNotFound: transformers, 4.56 or later, is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise LibraryNotFound(
            f"transformers with AttentionMaskInterface does not load ({error}); pip install "
            "'transformers>=4.56'"
        ) from error
    AttentionInterface.register(name, attention_hook)
    AttentionMaskInterface.register(name, mask_hook)


def attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **words: Any,
) -> tuple[torch.Tensor, None]:
    """What a model's attention layer calls: query (batch, head, q_row, dim), the key and value
    heads not repeated.

    Returns:
        (o, None), o (batch, q_row, head, dim) contiguous.

    Raises:
        fulmen.UnsupportedError: the probabilities are asked for; they are never made.
    """
    if output_attentions:
        raise UnsupportedError(
            "output_attentions=True asks for the attention probabilities, which fulmen never "
            "makes; attn_implementation='eager' does"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask: Any = None
    bias = position_bias
    window = None
    if attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = attention_mask[:, :, :, : key.shape[-2]]
        causal = False
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    else:
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if causal else sliding_window - 1)
        if attention_mask is not None:
            mask = _of_two_axes(attention_mask, query, key)
    o = attention(
        query,
        key,
        value,
        scale=scaling,
        causal=bool(causal),
        window=window,
        mask=mask,
        bias=bias,
        sinks=s_aux,
        dropout_p=dropout,
        **same_words(words),
    )
    return o.transpose(1, 2).contiguous(), None


def _of_two_axes(attention_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    """A boolean padding mask of keys, or the numbers of packed documents."""
    if attention_mask.dim() != 2:
        raise ArgumentError(
            f"attention_mask has {attention_mask.dim()} axes; 2 (batch, kv_row) and 4 (batch, "
            "head, q_row, kv_row) are read"
        )
    if attention_mask.dtype != torch.bool:
        num_q = query.shape[-2]
        return masks.documents(attention_mask[:, -num_q:], attention_mask)
    if attention_mask.shape[1] < key.shape[-2]:  # a static cache: what lies beyond is not filled
        missing = key.shape[-2] - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, None, None, :]


def mask_hook(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers calls once per forward pass and kind of layer.

    Returns:
        None (nothing but structure), a boolean (batch, kv_length) padding mask, the integers
        (batch, kv_length) of packed documents, or a boolean mask of four axes.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    plain, documents = _structure(function)
    is_offset_known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    is_level = is_offset_known and q_offset + q_length == kv_offset + kv_length
    if plain == "bidirectional" or (plain is not None and is_level):
        if documents is None and not use_vmap:
            return _of_keys(attention_mask, kv_length, kv_offset)
        is_whole = q_offset == 0 and kv_offset == 0 and attention_mask is None
        if documents is not None and is_whole and documents.shape[-1] == kv_length:
            return documents.expand(batch_size, kv_length)
    kwargs.pop("allow_is_causal_skip", None)
    kwargs.pop("allow_is_bidirectional_skip", None)
    dense: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        **kwargs,
    )
    return dense


def _of_keys(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: Any
) -> torch.Tensor | None:
    if attention_mask is None or attention_mask.shape[1] == kv_length:
        return attention_mask  # cut already: generate() runs the hook twice
    return attention_mask[:, kv_offset : kv_offset + kv_length]


_AND = "and_masks.<locals>.and_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_WINDOW_BOTH = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


def _structure(function: Any) -> tuple[str | None, torch.Tensor | None]:
    """("causal", "bidirectional" or None for any other pattern; the numbers of packed documents).

    A window is structure too: the layer's own `sliding_window` says how wide. torch.compile does
    not let a closure be looked into: there all but the two plain patterns are others.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return "causal", None
    if function is bidirectional_mask_function:
        return "bidirectional", None
    if torch.compiler.is_compiling():
        return None, None
    if function.__module__ != causal_mask_function.__module__:
        return None, None
    name = function.__qualname__
    if name == _REMAPPED:  # positions start anew in each document: distances stay what they are
        return _structure(_closed_over(function, "mask_function"))
    if name != _AND:
        return None, None
    plain: str | None = None
    documents: torch.Tensor | None = None
    for part in _closed_over(function, "mask_functions"):
        inner = getattr(part, "__qualname__", "")
        if inner in (_WINDOW, _WINDOW_BOTH):
            continue
        if inner == _PACKED:
            found, nested = None, _closed_over(part, "packed_sequence_mask")
        else:
            found, nested = _structure(part)
            if found is None:
                return None, None
        if (found and plain) or (nested is not None and documents is not None):
            return None, None
        plain = found or plain
        documents = documents if nested is None else nested
    return plain, documents


def _closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
