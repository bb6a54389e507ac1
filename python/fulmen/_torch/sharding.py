# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How DTensors are split among devices: by batch or by heads, without communication.

Each device computes its batch entries, or its heads, as a call of its own. What an operator reads
beside q, k and v is split where it has that axis; the gradient of what is broadcast over it is a
partial sum. Rows and keys are not split: DTensor gathers them first, as it does whatever else these
rules do not know. Nor is a call with dropout split, whose pattern is that of the whole call, nor
one over pages, which any request may use, nor one with an expression, which knows its heads and
batch entries by number, nor one with lists of blocks, whose heads are those of q or of k.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import lru_cache
from typing import Any

import torch

from .._library import schema
from . import ops

_EXPRESSION = schema().options["expression"]["offset"] // 8


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def enter_rules() -> None:
    """Tells DTensor, once it has been imported, how the operators may be split."""
    if "torch.distributed.tensor" in sys.modules:
        _enter_rules()


@lru_cache(maxsize=1)
def _enter_rules() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(ops.attention_kernel)(_forward)
    register_sharding(ops.attention_batched_backward)(_backward)


def _axis(name: str, x: Any, wanted: str, layout: int) -> int | None:
    """Where an array of the call has its batch or its heads; None: it is broadcast over them."""
    row = schema().arrays[name]
    rank = layout // 2
    if row["has_head_and_row"] and not row["broadcast"]:
        if wanted == "batch":
            return 0 if rank == 4 else None
        return rank - 2 if layout & 1 else rank - 3
    axes = list(row["axes"])
    if row["has_head_and_row"] and layout & 1:
        axes[1], axes[2] = axes[2], axes[1]
    named = {"kv_head": "head"}
    places = [named.get(axis, axis) for axis in axes[len(axes) - x.ndim :]]
    if wanted not in places:
        return None
    index = places.index(wanted)
    is_broadcast = len(axes) == 4 and x.shape[index] == 1
    return None if is_broadcast else index


def _even_heads(arrays: Any, layout: int) -> bool:
    """Whether every device would get the keys of its queries' groups, however a mesh is cut."""
    heads, kv_heads = (
        x.shape[_axis(name, x, "head", layout)] for name, x in (("q", arrays.q), ("k", arrays.k))
    )
    if heads == kv_heads:
        return True
    sizes = arrays.q.mesh.shape
    chosen = (c for n in range(1, len(sizes) + 1) for c in itertools.combinations(sizes, n))
    return all(math.prod(c) > kv_heads or kv_heads % math.prod(c) == 0 for c in chosen)


def _ways(arrays: Any, settings: Any) -> list[str | None]:
    """What may be split along one axis of a mesh: nothing, the batch, the heads."""
    ways: list[str | None] = [None]
    layout = settings.layout
    if settings.options[_EXPRESSION] != 0:
        return ways
    whole = (arrays.rng, arrays.page_table, arrays.blocks, arrays.q_segments)
    if any(x is not None for x in whole):
        return ways
    if layout // 2 == 4 and arrays.cu_q is None:
        ways.append("batch")
    if layout // 2 >= 3 and _even_heads(arrays, layout):
        ways.append("head")
    return ways


def _placed(index: int | None, otherwise: Any = None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return (otherwise or Replicate()) if index is None else Shard(index)


def _inputs(arrays: Any, way: str | None, layout: int) -> list[Any]:
    found = []
    for name, x in zip(arrays._fields, arrays):
        index = None if way is None or x is None else _axis(name, x, way, layout)
        found.append(None if x is None else _placed(index))
    return found


def _of_rows(way: str | None, layout: int) -> Any:
    """Of o and lse, stats: (batch, head, row) without what the layout leaves out."""
    rank = layout // 2
    heads = (rank - 2 if layout & 1 else rank - 3, rank - 3)
    of_o, of_lse = {None: (None, None), "batch": (0, 0), "head": heads}[way]
    return _placed(of_o), _placed(of_lse)


def _forward(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    arrays, settings, (outputs,) = ops.split(args)
    rules = []
    for way in _ways(arrays, settings):
        o, lse = _of_rows(way, settings.layout)
        has_lse, has_stats = outputs in (ops.WITH_LSE, ops.WITH_STATS), outputs >= ops.WITH_STATS
        results = [o, lse if has_lse else None, lse if has_stats else None]
        rest = [None] * (len(args) - len(arrays))
        rules.append((results, [*_inputs(arrays, way, settings.layout), *rest]))
    return rules


def _backward(
    do: Any, dlse: Any, o: Any, stats: Any, *args: Any
) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Partial

    arrays, settings, (need,) = ops.split(args)
    rules = []
    for way in _ways(arrays, settings):
        of_o, of_lse = _of_rows(way, settings.layout)
        inputs = _inputs(arrays, way, settings.layout)
        results = []
        for index, wanted in zip(ops.DIFFERENTIABLE, need):
            name, x = arrays._fields[index], arrays[index]
            place = _placed(None)
            if wanted:
                split = None if way is None else _axis(name, x, way, settings.layout)
                place = _placed(split, None if way is None else Partial())
            results.append(place)
        outer = [
            None if x is None else place
            for x, place in ((do, of_o), (dlse, of_lse), (o, of_o), (stats, of_lse))
        ]
        rest = [None] * (len(args) - len(arrays))
        rules.append((results, [*outer, *inputs, *rest]))
    return rules
