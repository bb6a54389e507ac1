# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses among the arguments beside q, k and v: what they mean, which are refused.

The memory of a plain tensor is its value. A subclass with a __torch_dispatch__ of its own (DTensor,
FakeTensor) computes the operators itself. One that overrides __torch_function__ may hold anything
in its memory: torch's CausalBias, which never writes its own, is read by its fields, and others are
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._library import schema
from ..errors import ArgumentError, ShapeError, UnsupportedError
from . import guards

# What the matrix of a CausalBias would be placed by, too: fulmen has one alignment for a call.
_PLACED = ["causal", "window", "alibi_slopes", "q_lengths", "kv_lengths", "cu_q"]
_PLACED += [name for name, row in schema().options.items() if row["kind"] in ("limit", "count")]


def causal_alignment(x: Any) -> str | None:
    """The alignment that a CausalBias of torch.nn.attention.bias says; None: x is none."""
    kind = type(x)
    if kind.__name__ != "CausalBias" or kind.__module__ != "torch.nn.attention.bias":
        return None
    return "top_left" if x.variant.name == "UPPER_LEFT" else "bottom_right"


def causal_options(
    x: Any, name: str, alignment: str, q: Any, k: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that a CausalBias stands for.

    Args:
        x: a CausalBias.
        name: what the caller calls it.
        alignment: of causal_alignment.
        q, k: of the call.
        options: what else is given, by the names of the schema, and window.

    Raises:
        ShapeError: it was made for other lengths.
        ArgumentError: beside it stands what has an alignment of its own.
    """
    rows = -3 if options.get("layout") in ("bshd", "shd") else -2
    made_for, given = (x.seq_len_q, x.seq_len_kv), (q.shape[rows], k.shape[rows])
    if made_for != given:
        raise ShapeError(
            f"{name} is a CausalBias for {made_for[0]} rows and {made_for[1]} keys; q has "
            f"{given[0]} rows and k {given[1]}"
        )
    for other in _PLACED:
        if options.get(other) is not None and options[other] is not False:
            raise ArgumentError(
                f"{name} is a CausalBias and {other} is given; causal=True, "
                f"alignment={alignment!r} says the same as {name} and may stand beside it"
            )
    return {"causal": True, "alignment": alignment}


def computes_itself(x: Any, name: str) -> bool:
    """Whether x has a __torch_dispatch__, so that the call must be an operator.

    Raises:
        UnsupportedError: it overrides __torch_function__, so that its memory may say nothing.
    """
    kind = type(x)
    if kind in guards.PLAIN:
        return False
    if not _overrides(kind):
        return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    alignment = causal_alignment(x)
    instead = f"{name}.as_subclass(torch.Tensor) is the plain one where its memory holds its value"
    if alignment is not None:
        instead = f"causal=True, alignment={alignment!r} says the same"
    raise UnsupportedError(
        f"{name} is {kind.__name__}, a tensor with a meaning of its own; {instead}"
    )


def _overrides(kind: Any) -> bool:
    """Whether a subclass of Tensor has a __torch_function__ of its own."""
    own = kind.__torch_function__
    plain = Tensor.__torch_function__
    if getattr(own, "__func__", own) is plain.__func__:
        return False
    return own is not guards.no_torch_function
