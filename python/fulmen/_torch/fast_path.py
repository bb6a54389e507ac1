# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The fast path: eager, no mode and no transform. Most calls of most models and servers.

The library keeps the options under a number and has kernels in PyTorch's dispatcher. For q, k and v
alone (src/ffi/torch_sdpa_node.cpp): one for calls that record nothing, and a pair behind PyTorch's
own attention node, whose backward pass then needs no Python. The number travels through that node
as its dropout_p, which nothing else reads there. For calls with more tensors, lengths and pages
say, with lse or into a tensor of the caller, and for runs of a plan (src/ffi/torch_operators.cpp):
one each, where nothing is recorded. What this path cannot do, an error included, is left to the
caller (api.py, fulmen.planning), which takes every argument and says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import expressions, masks
from .._library import expression_number, library, schema
from ..keywords import KEYWORDS
from ..options import settings_of
from . import guards, ops

# Keywords that the kernels take; beside them such as say nothing: None, no dropout.
_TAKEN = {"expression", *KEYWORDS & {"layout", "window", *schema().options} - {"dropout_p"}}
_TEXTS = {"score", "mask"}
# Inputs behind v that they take, with their places; the others have more to be said about them.
_OTHERS = {
    name: index
    for index, name in enumerate(schema().inputs)
    if name in schema().optional_inputs and name not in ("mask", "bias", "rng", "q_ids", "kv_ids")
}
_MOST_OTHERS = 7  # their places are in one integer, 8 bits each


class Way(NamedTuple):
    """How calls with such keywords go."""

    number: int  # under which the library keeps the options
    which: int  # the places of the tensors behind v
    outputs: int  # as the operators have it (ops.py)
    is_plain: bool  # q, k and v alone, and o alone


# By (is_deterministic, names of tensors, *other keywords): asked on every call, quicker than
# lru_cache. None: not by this path.
_ways: dict[tuple[Any, ...], Way | None] = {}
_lock = threading.Lock()
MOST_KEYS = 4096
_KEPT_TYPES = {bool, int, float, str, type(None)}  # no array stays alive by its key

_unrecorded = torch.ops.fulmen.plain.default._op
_kept = torch.ops.fulmen.kept.default._op
_planned = torch.ops.fulmen.planned.default._op


def fast_attention(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """o, or (o, lse) with return_lse; differentiable where q, k and v are all its tensors.

    None: not by this path. Call it where guards.allows_fast_path.
    """
    others, said = {}, []
    if options.keys() & _TEXTS:
        options = _with_texts(options)
    for item in options.items():
        if type(item[1]) in guards.PLAIN:
            others[item[0]] = item[1]
        else:
            said.append(item)
    key = (guards.is_deterministic(), tuple(others), *said)
    try:
        way = _ways[key] if key in _ways else way_of(key)
    except TypeError:  # arrays and lists among the values
        return None
    if way is None:
        return None
    if torch.is_grad_enabled():
        records = q.requires_grad or k.requires_grad or v.requires_grad
        if records and (not way.is_plain or k.dtype in ops.QUANTISED):
            return None
        for x in others.values():
            if x.requires_grad:
                return None
    else:
        records = False
    try:
        if not way.is_plain:
            return _with_others(q, k, v, others, way)
        if q.device == k.device == v.device:  # else the dispatcher asks the device of any of them
            if records:
                return ops.node(q, k, v, None, way.number, True, False)[0]
            return _unrecorded(q, k, v, way.number)
    except RuntimeError:  # what the kernels raise; a checkpoint that has all it needs raises others
        pass
    return None


def _with_texts(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords with what a score and a mask as texts stand for, by the names of the schema.

    As they are with other masks and with numbers ($name), by which no more is kept.
    """
    rest = dict(options)
    mask = rest.pop("mask", None)
    if isinstance(mask, str):
        mask = masks.expression(mask)
    if mask is not None and type(mask) is not masks.Expression:
        return options
    texts = () if mask is None else (mask,)
    found = expressions.resolved(rest.pop("score", None), texts, expression_number)
    return options if expressions.SCALARS[0] in found else {**rest, **found}


def _with_others(q: Tensor, k: Tensor, v: Tensor, others: dict[str, Tensor], way: Way) -> Any:
    """The call with tensors behind v, with lse, or into `out`; nothing is recorded."""
    out = others.pop("out", None)
    arrays = list(others.values())
    o, lse = _kept(q, k, v, arrays, way.which, way.number, way.outputs, out)
    if out is not None:
        o = written(out)
    return o if way.outputs == ops.O_ONLY else (o, lse)


def written(out: Tensor) -> Tensor:
    """A tensor that a kernel has written, which autograd is told."""
    torch.autograd.graph.increment_version(out)
    return out


def which_of(names: Iterable[str]) -> int | None:
    """The places of inputs behind v in one integer; None: the kernels do not take them."""
    places = [_OTHERS.get(name) for name in names]
    if None in places or len(places) > _MOST_OTHERS:
        return None
    return sum(place << 8 * i for i, place in enumerate(places) if place is not None)


def fast_planned(
    plan: tuple[int, int, int, bool],
    qkv: tuple[Tensor, Tensor, Tensor],
    others: Iterable[Any],
    out: Any,
    workspace: Any,
) -> Any:
    """(o, lse, stats) of a run of a plan on PyTorch's current stream; None: not by this path.

    Args:
        plan: which inputs behind v there are, as `which_of` has it; the plan of the library; the
            code of its layout; whether stats are computed, None else.
        qkv: the first inputs.
        others: the inputs behind v.
        out: where o goes, or None.
        workspace: a vector of bytes, or None: from PyTorch's allocator.
    """
    which, handle, layout, has_stats = plan
    if not guards.allows_fast_path(*qkv) or not ops.has_kernels():
        return None
    arrays = list(others)
    outputs = ops.WITH_STATS if has_stats else ops.WITH_LSE
    try:
        o, lse, stats = _planned(*qkv, arrays, which, handle, layout, outputs, out, workspace)
    except (RuntimeError, TypeError):  # refused, or no tensors
        return None
    return (o if out is None else written(out)), lse, stats


def way_of(key: tuple[Any, ...]) -> Way | None:
    """How calls with (is_deterministic, names of tensors, *other keywords) go.

    None where the library keeps no more, has no kernels here, or they do not take such keywords.
    """
    is_deterministic, names, *said = key
    given, return_lse = [], False
    which = which_of(name for name in names if name != "out")
    takes = which is not None
    for name, value in said:
        if name in _TAKEN:
            given.append((name, value))
        elif name == "return_lse":
            return_lse = value is True
            takes = takes and (value is None or isinstance(value, bool))
        elif value is not None and not (name == "dropout_p" and value in (False, 0)):
            takes = False
    if not takes or not ops.has_kernels():
        if len(_ways) < MOST_KEYS and all(type(value) in _KEPT_TYPES for _, value in said):
            _ways[key] = None
        return None
    if is_deterministic:
        given.append(("deterministic", True))
    with _lock:
        if _ways.get(key) is None:
            settings = settings_of(tuple(given), "cu_q" in names)
            number = library().keep_options(settings.problem, settings.layout.code)
            if number == 0:
                return None
            ops.kept_settings[number] = settings
            outputs = ops.WITH_LSE if return_lse else ops.O_ONLY
            _ways[key] = Way(number, which or 0, outputs, not names and not return_lse)
    return _ways[key]
