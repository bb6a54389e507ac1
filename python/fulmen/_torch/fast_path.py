# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The fast path: q, k and v alone, eager, no mode and no transform. Most calls of most models.

The library keeps the options under a number and has kernels in PyTorch's dispatcher
(src/ffi/torch_sdpa_node.cpp): one for calls that record nothing, and a pair behind PyTorch's own
attention node, whose backward pass then needs no Python. The number travels through that node as
its dropout_p, which nothing else reads there. What this path cannot do, an error included, is left
to the caller (api.py), which takes every argument and says what is wrong.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from .._library import library, schema
from ..keywords import KEYWORDS
from ..options import settings_of
from . import guards, ops

# Keywords that the kernels take; beside them such as say nothing: None, no dropout, no lse.
_TAKEN = KEYWORDS & {"layout", "window", *schema().options} - {"dropout_p"}
_WITHOUT = {"dropout_p", "return_lse"}

# The number of the options by (is_deterministic, *keywords): asked on every call, quicker than
# lru_cache.
_numbers: dict[tuple[Any, ...], int] = {}
_lock = threading.Lock()
MOST_KEYS = 4096

_unrecorded = torch.ops.fulmen.plain.default._op


def fast_attention(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """o, differentiable where one of the three requires it; None: not by this path.

    Call it where guards.allows_fast_path.
    """
    key = (guards.is_deterministic(), *options.items())
    try:
        number = _numbers.get(key)
        if number is None:
            number = number_of(key)
    except TypeError:  # arrays and lists among the values
        return None
    if number == 0:
        return None
    records = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    if records and k.dtype in ops.QUANTISED:  # refused by name
        return None
    try:
        if q.device == k.device == v.device:  # else the dispatcher asks the device of any of them
            if records:
                return ops.node(q, k, v, None, number, True, False)[0]
            return _unrecorded(q, k, v, number)
    except RuntimeError:  # what the kernels raise; a checkpoint that has all it needs raises others
        pass
    return None


def number_of(key: tuple[Any, ...]) -> int:
    """The number under which the library keeps (is_deterministic, *keywords), for good.

    0 where it keeps no more, has no kernels here, or the kernels do not take such keywords.
    """
    given = []
    for name, value in key[1:]:
        if name in _TAKEN:
            given.append((name, value))
        elif value is not None and not (name in _WITHOUT and value in (False, 0)):
            if isinstance(value, (bool, float)) and len(_numbers) < MOST_KEYS:
                _numbers[key] = 0
            return 0
    if not ops.has_kernels():
        return 0
    if key[0]:
        given.append(("deterministic", True))
    with _lock:
        if key not in _numbers:
            settings = settings_of(tuple(given))
            number = library().keep_options(settings.problem, settings.layout.code)
            if number == 0:
                return 0
            ops.kept_settings[number] = settings
            _numbers[key] = number
    return _numbers[key]
