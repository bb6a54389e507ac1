# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over the operators: the mapped axis becomes part of the batch.

Where it cannot (packed sequences, dropout, mapped sinks, no axis for it in the layout, gradients
that are summed over the batch), the calls follow one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .settings import Arrays, Settings

BATCHED = {"bhsd": "bhsd", "bshd": "bshd", "hsd": "bhsd", "shd": "bshd"}


def _first(x: Any, dim: Any) -> Any:
    return x if x is None or dim is None else x.movedim(dim, 0)


def _foldable(settings: Settings, arrays: Arrays, dims: Arrays) -> bool:
    return (
        settings.layout in BATCHED
        and settings.dropout_p == 0
        and arrays.cu_q is None
        and dims.sinks is None
    )


def _folded(x: Tensor, mapped: bool, size: int) -> Tensor:
    """(size * batch, ...) from (batch, ...), or from (size, [batch,] ...) where it is mapped."""
    if not mapped:
        x = x.expand(size, *x.shape)
    return x.flatten(0, 1)


def _folded_array(
    name: str, x: Tensor, mapped: bool, batch: int, size: int, has_batch: bool
) -> Tensor:
    """One array of the call in which (size, batch) are one axis; x itself where it broadcasts."""
    own = x.dim() - mapped
    if name in ("q", "k", "v"):
        return _folded(x if has_batch else x.unsqueeze(1 if mapped else 0), mapped, size)
    if name in ("bias", "mask"):
        if not mapped and (own < 4 or x.shape[0] == 1):
            return x
        x = x.reshape(x.shape[:mapped] + (1,) * (4 - own) + x.shape[mapped:])
        return _folded(x.expand(*x.shape[:mapped], batch, *x.shape[mapped + 1 :]), mapped, size)
    # (batch,) lengths, ([batch,] head) slopes, ([batch,] row) ids
    if own == 1 and name in ("alibi_slopes", "q_ids", "kv_ids"):
        if not mapped:
            return x
        x = x.unsqueeze(1).expand(size, batch, x.shape[-1])
    return _folded(x, mapped, size)


def _folded_arrays(
    arrays: Arrays, dims: Arrays, settings: Settings, size: int
) -> tuple[Arrays, Settings]:
    has_batch = len(settings.layout) == 4
    fold: dict[str, Any] = {}
    batch = 1
    if has_batch:
        axis = 1 if dims.q is not None else 0
        batch = _first(arrays.q, dims.q).shape[axis]
    for name, given, dim in zip(Arrays._fields, arrays, dims):
        if given is not None and name not in ("sinks", "rng", "cu_q", "cu_kv"):
            fold[name] = _folded_array(
                name, _first(given, dim), dim is not None, batch, size, has_batch
            )
    return arrays._replace(**fold), settings._replace(layout=BATCHED[settings.layout])


def _unfolded(x: Any, size: int, has_batch: bool) -> Any:
    if x is None:
        return None
    return x.unflatten(0, (size, x.shape[0] // size)) if has_batch else x


def _selected(x: Any, dim: Any, index: int) -> Any:
    return x if x is None or dim is None else x.select(dim, index)


def _one_by_one(function: Any, info: Any, dims: Any, leading: tuple[Any, ...], args: Any) -> Any:
    results = [
        function.apply(*leading, *(_selected(x, dim, index) for x, dim in zip(args, dims)))
        for index in range(info.batch_size)
    ]
    stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*results))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def mapped_forward(
    function: Any, info: Any, in_dims: Any, settings: Settings, arrays: Arrays
) -> Any:
    """The vmap rule of Attention."""
    dims = Arrays(*in_dims)
    if not _foldable(settings, arrays, dims):
        return _one_by_one(function, info, in_dims, (settings,), arrays)
    size = info.batch_size
    folded, settings_of_fold = _folded_arrays(arrays, dims, settings, size)
    results = function.apply(settings_of_fold, *folded)
    has_batch = len(settings.layout) == 4
    return tuple(_unfolded(x, size, has_batch) for x in results), (0, 0, 0)


def mapped_backward(
    function: Any, info: Any, in_dims: Any, settings: Settings, need: Any, args: Any
) -> Any:
    """The vmap rule of AttentionBackward."""
    arrays, dims = Arrays(*args[4:]), Arrays(*in_dims[4:])
    if need[3] or need[4] or not _foldable(settings, arrays, dims):
        return _one_by_one(function, info, in_dims, (settings, need), args)
    size = info.batch_size
    folded, settings_of_fold = _folded_arrays(arrays, dims, settings, size)
    has_batch = len(settings.layout) == 4
    outer: list[Any] = []
    for x, dim in zip(args[:4], in_dims[:4]):
        first = _first(x, dim)
        if first is not None and not has_batch:
            first = first.unsqueeze(0 if dim is None else 1)
        outer.append(None if first is None else _folded(first, dim is not None, size))
    results = function.apply(settings_of_fold, need, *outer, *folded)
    out = tuple(_unfolded(x, size, has_batch) for x in results)
    return out, tuple(None if x is None else 0 for x in out)
