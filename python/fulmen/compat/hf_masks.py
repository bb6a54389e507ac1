# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The masks of Hugging Face transformers, as structure: the mask hook of fulmen.compat.hf.

What a mask says stays structure (nothing, a padding mask of keys, the numbers of packed documents)
where it is plain causal, bidirectional or sliding, so that no quadratic mask is made; any other
pattern, and the prefill of a static cache, become the dense mask of transformers' own sdpa.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, NamedTuple

import torch

from ..errors import LibraryNotFound, UnsupportedError


class PackedDocuments(NamedTuple):
    """What the mask hook says of packed documents, as no mask of a model's own looks."""

    ids: torch.Tensor  # (batch, row) integers: the document of each token


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
) -> torch.Tensor | PackedDocuments | None:
    """What transformers calls once per forward pass and kind of layer.

    Returns:
        None (nothing but structure), a boolean (batch, kv_length) padding mask, the numbers of
        packed documents, or a boolean mask of four axes.

    Raises:
        fulmen.UnsupportedError: the model has attention code of its own, which would misread it.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if not torch.compiler.is_compiling():
        _refuse_own_code(kwargs.get("config"))
    function = causal_mask_function if mask_function is None else mask_function
    plain, documents = _structure(function)
    is_offset_known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    is_level = is_offset_known and q_offset + q_length == kv_offset + kv_length
    if plain == "bidirectional" or (plain is not None and is_level):
        skips = "allow_is_bidirectional_skip" if plain == "bidirectional" else _CAUSAL_SKIP
        if documents is None and not use_vmap and kwargs.get(skips, True):
            return _of_keys(attention_mask, kv_length, kv_offset)
        is_whole = q_offset == 0 and kv_offset == 0 and attention_mask is None
        if documents is not None and is_whole and documents.shape[-1] == kv_length:
            return PackedDocuments(documents.expand(batch_size, kv_length))
    kwargs.pop(_CAUSAL_SKIP, None)
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


def interfaces() -> tuple[Any, Any]:
    """transformers' AttentionInterface and AttentionMaskInterface; LibraryNotFound without them."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise LibraryNotFound(
            f"transformers with AttentionMaskInterface does not load ({error}); pip install "
            "'transformers>=4.56'"
        ) from error
    return AttentionInterface, AttentionMaskInterface


def has_interface(model: Any) -> bool:
    """Whether a class of transformers' models computes attention by AttentionInterface."""
    if model._can_set_attn_implementation():
        return True
    names = {base.__module__ for base in model.__mro__} - {"transformers.modeling_utils"}
    return any(hasattr(sys.modules.get(x), "ALL_ATTENTION_FUNCTIONS") for x in names)


def _refuse_own_code(config: Any) -> None:
    """Refuses a config that was made to say fulmen where the model does not call it."""
    kind: Any = type(config)
    model = _keeps_own_code(kind)
    if model is not None:
        raise UnsupportedError(
            f"{kind.__name__} says attn_implementation={config._attn_implementation!r}, "
            f"and {model} has attention code of its own, which calls fulmen for the mask alone; "
            "'eager' is what it knows"
        )


@functools.lru_cache(maxsize=256)
def _keeps_own_code(config: Any) -> str | None:
    """The name of a model of the family of a config that does not use the interface."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    for found in list(vars(module or object).values()):
        is_model = getattr(found, "__module__", "") == name and hasattr(found, _HEURISTIC)
        if is_model and not has_interface(found):
            return str(found.__name__)
    return None


_CAUSAL_SKIP = "allow_is_causal_skip"
_HEURISTIC = "_can_set_attn_implementation"


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
