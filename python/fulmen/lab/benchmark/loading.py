# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How other libraries are loaded, each when it is asked for, and what is said of one that is not
here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


class MissingError(Exception):
    """A side that cannot answer here, with the reason in one clause."""


def load(module: str) -> Any:
    """A module of a peer.

    Raises:
        MissingError: it does not import.
    """
    try:
        return import_module(module)
    except Exception as error:  # a package of another build fails in many ways
        raise MissingError(f"{module} does not load: {first_line(error)}") from error


@cache  # a library registers its operators once a process
def flash_attention_3_operators(path: str) -> Any:
    """The operators of FlashAttention-3 in a shared library: no Python between.

    Args:
        path: of _C.so of flash_attn_3.

    Raises:
        MissingError: it does not load, or brings none.
    """
    torch: Any = import_module("torch")
    before = set(torch._C._dispatch_get_all_op_names())
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        raise MissingError(f"{path} does not load: {first_line(error)}") from error
    new = set(torch._C._dispatch_get_all_op_names()) - before
    spaces = sorted({name.split("::")[0] for name in new if name.endswith("::fwd")})
    if not spaces:
        raise MissingError(f"{path} brings no operator called fwd")
    return getattr(torch.ops, spaces[0])


def torch_attention(name: str, causal: bool, grouped: bool) -> Callable[[Any, Any, Any], Any]:
    """torch's scaled_dot_product_attention through one of its backends.

    Args:
        name: the backend as torch calls it, such as "CUDNN_ATTENTION".
        causal: from the first key on.
        grouped: several query heads share keys.

    Raises:
        MissingError: this torch has no such backend.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = getattr(SDPBackend, name, None)
    if backend is None:
        raise MissingError(f"torch {torch.__version__} has no {name}")

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return forward


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
