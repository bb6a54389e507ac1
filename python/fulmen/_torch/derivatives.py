# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Forward mode and second derivatives, composed block by block from reference.py; and torch.vmap.

With f the attention of a block and g = the gradients of f (its vjp), both plain functions:

    forward mode of f        the transpose of the transpose: vjp of u -> vjp(f)(u)
    derivatives of backward  vjp of g, and forward mode of g in the same way

Row blocks touch their own rows of q, do and dlse, and add up in the other leaves. They follow one
another, each with at most BLOCK_ELEMS scores per tensor, so that memory is linear in the sequence;
time is that of the naive method.

Under torch.vmap the mapped axis becomes part of the batch. Where it cannot (packed sequences,
dropout, mapped sinks, no axis for it in the layout, gradients that are summed over the batch), the
calls follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from .._library import schema
from ..errors import UnsupportedError
from .geometry import Geometry, geometry_of
from .reference import Leaves, Meaning, accumulator, as_layout, attention_rows, heads_first

BLOCK_ELEMS = 1 << 22
OUTER = 2  # do and dlse come before the leaves
_LEAVES = [schema().arrays[name] for name in schema().differentiable_inputs]


def blocks(arrays: Any, meaning: Meaning) -> Iterator[tuple[slice, Callable[..., Any]]]:
    """Blocks of query rows; with each the function (q of these rows, leaves) -> (o, lse)."""
    q = heads_first(arrays.q, meaning.layout)
    k = heads_first(arrays.k, meaning.layout)
    num_q, num_kv = q.shape[-2], k.shape[-2]
    step = max(1, BLOCK_ELEMS // max(1, q.shape[0] * q.shape[1] * num_kv))
    for first in range(0, num_q, step):
        rows = slice(first, min(first + step, num_q))
        where = geometry_of(arrays, meaning, q.shape[0], num_q, num_kv, rows)

        def of_rows(block: Tensor, leaves: Any, where: Geometry = where) -> Any:
            with torch.autocast(q.device.type, enabled=False):
                return attention_rows(leaves, block, meaning, arrays, where)

        yield rows, of_rows


def _three_axes(x: Any) -> Any:
    return None if x is None else x.reshape((1,) * (3 - x.dim()) + tuple(x.shape))


def _cut(x: Any, rows: slice, axis: int) -> Any:
    return None if x is None else x.narrow(axis, rows.start, rows.stop - rows.start)


class _Call:
    """The arguments of a backward call, do, dlse and the leaves: heads first, and where a row block
    cuts them."""

    # The row axis of do, dlse and q; the others stay whole.
    AXES = (-2, -1, *(-2 if x["has_head_and_row"] and "q_row" in x["axes"] else None
                      for x in _LEAVES))  # fmt: skip
    # 0: the axes of the layout, 1: those of lse, 2: as it is
    KINDS = (0, 1, *(0 if x["has_head_and_row"] else 2 for x in _LEAVES))

    def __init__(self, meaning: Meaning) -> None:
        self.layout = meaning.layout

    def standard(self, values: Sequence[Any]) -> list[Any]:
        """Do, dlse and the leaves heads first; a shorter list is its end."""
        kinds = self.KINDS[-len(values) :]
        make: tuple[Callable[[Any], Any], ...] = (
            lambda x: heads_first(x, self.layout),
            _three_axes,
            lambda x: x,
        )
        return [make[kind](x) for kind, x in zip(kinds, values)]

    def cut(self, values: Sequence[Any], rows: slice) -> list[Any]:
        axes = self.AXES[-len(values) :]
        return [x if axis is None else _cut(x, rows, axis) for x, axis in zip(values, axes)]

    def gathered(self, pieces: list[list[Any]], likes: Sequence[Any]) -> list[Any]:
        """Results of all blocks: rows follow one another, the rest adds up; in the layout."""
        axes = self.AXES[-len(likes) :]
        results: list[Any] = []
        for index, (axis, like) in enumerate(zip(axes, likes)):
            parts = [piece[index] for piece in pieces]
            if like is None:
                results.append(None)
            elif axis is None:
                results.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(like))
            else:
                results.append(torch.cat(parts, axis) if parts else torch.zeros_like(like))
        for index, kind in enumerate(self.KINDS[-len(likes) :]):
            if results[index] is None:
                continue
            if kind == 0:
                results[index] = as_layout(results[index], self.layout)
            elif kind == 1 and len(self.layout) < 4:
                shape = results[index].shape[4 - len(self.layout) :]
                results[index] = results[index].reshape(shape)
        return results


def _packed(
    function: Callable[..., Any], values: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """The function of those values that are there."""
    present = [index for index, x in enumerate(values) if x is not None]

    def of_present(*xs: Any) -> Any:
        full = list(values)
        for index, x in zip(present, xs):
            full[index] = x
        return function(*full)

    return of_present, [values[index] for index in present], present


def _unpacked(xs: Sequence[Any], present: list[int], length: int) -> list[Any]:
    full: list[Any] = [None] * length
    for index, x in zip(present, xs):
        full[index] = x
    return full


def _gradients(of_rows: Callable[..., Any]) -> Callable[..., Any]:
    """g: (do, dlse, leaves) -> the gradients of the leaves that are there."""

    def g(do: Any, dlse: Any, *leaves: Any) -> Any:
        f, present, _ = _packed(lambda *xs: of_rows(xs[0], Leaves(*xs)), leaves)
        out, pull = torch.func.vjp(f, *present)
        return pull((do.to(out[0].dtype), dlse.to(out[1].dtype)))

    return g


def _pushed(
    function: Callable[..., Any], values: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """The forward-mode derivative: transposes the transpose, so that it needs no dual numbers."""
    out, pull = torch.func.vjp(function, *values)
    zeros = tuple(torch.zeros_like(x) for x in out)
    _, push = torch.func.vjp(lambda *u: pull(u), *zeros)
    tangents = [torch.zeros_like(x) if t is None else t for x, t in zip(values, tangents)]
    return tuple(push(tuple(t.to(x.dtype) for x, t in zip(values, tangents))))


def _leaves_of(arrays: Any) -> list[Any]:
    return [arrays[index] for index in schema().differentiable]


def forward_tangents(
    arrays: Any, meaning: Meaning, tangents: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """The tangents of (o, lse) from those of the leaves; None is zero."""
    call = _Call(meaning)
    leaves = call.standard(_leaves_of(arrays))
    moves = call.standard(tangents)
    pieces = []
    for rows, of_rows in blocks(arrays, meaning):
        f, values, present = _packed(
            lambda *xs, of_rows=of_rows: of_rows(xs[0], Leaves(*xs)), call.cut(leaves, rows)
        )
        cut = call.cut(moves, rows)
        pieces.append(list(_pushed(f, values, [cut[index] for index in present])))
    o = torch.cat([piece[0] for piece in pieces], -2)
    lse = torch.cat([piece[1] for piece in pieces], -1)
    return as_layout(o, meaning.layout), lse.reshape(lse.shape[4 - len(meaning.layout) :])


def _outer(do: Any, dlse: Any, o: Tensor, lse_shape: Any) -> tuple[Tensor, Tensor]:
    do = torch.zeros_like(o) if do is None else do
    return do, o.new_zeros(lse_shape, dtype=accumulator(o.dtype)) if dlse is None else dlse


def backward_cotangents(
    cotangents: Sequence[Any],
    do: Any,
    dlse: Any,
    o: Tensor,
    lse_shape: Any,
    arrays: Any,
    meaning: Meaning,
) -> list[Any]:
    """Vjp of the backward pass: from what arrives at the gradients of the leaves to those of
    do, dlse and the leaves."""
    call = _Call(meaning)
    values = [*_outer(do, dlse, o, lse_shape), *_leaves_of(arrays)]
    standard = call.standard(values)
    arriving = call.standard(cotangents)
    pieces = []
    for rows, of_rows in blocks(arrays, meaning):
        g, present_values, present = _packed(_gradients(of_rows), call.cut(standard, rows))
        out, pull = torch.func.vjp(g, *present_values)
        cut = call.cut(arriving, rows)
        given = [cut[index - OUTER] for index in present if index >= OUTER]
        filled = tuple(
            torch.zeros_like(x) if t is None else t.to(x.dtype) for x, t in zip(out, given)
        )
        pieces.append(_unpacked(pull(filled), present, len(values)))
    return call.gathered(pieces, values)


def backward_tangents(
    tangents: Sequence[Any],
    do: Any,
    dlse: Any,
    o: Tensor,
    lse_shape: Any,
    arrays: Any,
    meaning: Meaning,
) -> list[Any]:
    """Forward mode of the backward pass: tangents of do, dlse and the leaves to those of the
    gradients of the leaves."""
    call = _Call(meaning)
    values = [*_outer(do, dlse, o, lse_shape), *_leaves_of(arrays)]
    standard, moves = call.standard(values), call.standard(tangents)
    pieces = []
    for rows, of_rows in blocks(arrays, meaning):
        g, present_values, present = _packed(_gradients(of_rows), call.cut(standard, rows))
        cut = call.cut(moves, rows)
        pushed = _pushed(g, present_values, [cut[index] for index in present])
        leaves = [index - OUTER for index in present if index >= OUTER]
        pieces.append(_unpacked(pushed, leaves, len(_LEAVES)))
    return call.gathered(pieces, values[OUTER:])


def _first(x: Any, dim: Any) -> Any:
    return x if x is None or dim is None else x.movedim(dim, 0)


def _rank(settings: Any) -> int:
    return int(settings.layout) // 2


def _foldable(settings: Any, arrays: Any, dims: Any) -> bool:
    is_fixed_length = arrays.cu_q is None and arrays.rng is None and arrays.q_segments is None
    return _rank(settings) > 2 and is_fixed_length and dims.sinks is None


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
    row = schema().arrays[name]
    if row["has_head_and_row"]:
        return _folded(x if has_batch else x.unsqueeze(1 if mapped else 0), mapped, size)
    if len(row["axes"]) == 4:  # of the scores
        if not mapped and (own < 4 or x.shape[0] == 1):
            return x
        x = x.reshape(x.shape[:mapped] + (1,) * (4 - own) + x.shape[mapped:])
        return _folded(x.expand(*x.shape[:mapped], batch, *x.shape[mapped + 1 :]), mapped, size)
    # (batch,) lengths, ([batch,] head) slopes, ([batch,] row) ids
    if own < len(row["axes"]):
        if not mapped:
            return x
        x = x.unsqueeze(1).expand(size, batch, x.shape[-1])
    return _folded(x, mapped, size)


def _folded_arrays(arrays: Any, dims: Any, settings: Any, size: int) -> tuple[Any, Any]:
    has_batch = _rank(settings) == 4
    fold: dict[str, Any] = {}
    batch = 1
    if has_batch:
        axis = 1 if dims.q is not None else 0
        batch = _first(arrays.q, dims.q).shape[axis]
    for name, given, dim in zip(arrays._fields, arrays, dims):
        if given is not None and schema().arrays[name]["axes"][0] == "batch":
            fold[name] = _folded_array(
                name, _first(given, dim), dim is not None, batch, size, has_batch
            )
    return arrays._replace(**fold), settings._replace(layout=2 * 4 + settings.layout % 2)


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


_EXPRESSION = schema().options["expression"]["offset"] // 8


def refuse_expression(settings: Any) -> None:
    """Refuses what is composed of operations of torch for a call with a text of the user's.

    Raises:
        UnsupportedError: settings, of an operator, have an expression.
    """
    if settings.options[_EXPRESSION] != 0:
        raise UnsupportedError(
            "score and mask texts have first derivatives in reverse mode alone, and no vmap: leave "
            "create_graph, torch.func and forward mode out, or write the terms as bias="
        )


def mapped_forward(function: Any, info: Any, settings: Any, arrays: Any, dims: Any) -> Any:
    """The vmap rule of Attention; settings are those of the operators."""
    refuse_expression(settings)
    if not _foldable(settings, arrays, dims):
        return _one_by_one(function, info, dims, (settings,), arrays)
    size = info.batch_size
    folded, settings_of_fold = _folded_arrays(arrays, dims, settings, size)
    results = function.apply(settings_of_fold, *folded)
    has_batch = _rank(settings) == 4
    return tuple(_unfolded(x, size, has_batch) for x in results), (0, 0, 0)


def mapped_backward(
    function: Any,
    info: Any,
    settings: Any,
    need: Any,
    outer: tuple[Any, ...],
    outer_dims: tuple[Any, ...],
    arrays: Any,
    dims: Any,
) -> Any:
    """The vmap rule of AttentionBackward; outer: do, dlse, o, stats."""
    is_summed = any(need[3:])  # over the batch: all but the gradients of q, k and v
    if is_summed or not _foldable(settings, arrays, dims):
        every_dim, every = (*outer_dims, *dims), (*outer, *arrays)
        return _one_by_one(function, info, every_dim, (settings, need), every)
    size = info.batch_size
    folded, settings_of_fold = _folded_arrays(arrays, dims, settings, size)
    has_batch = _rank(settings) == 4
    folded_outer: list[Any] = []
    for x, dim in zip(outer, outer_dims):
        first = _first(x, dim)
        if first is not None and not has_batch:
            first = first.unsqueeze(0 if dim is None else 1)
        folded_outer.append(None if first is None else _folded(first, dim is not None, size))
    results = function.apply(settings_of_fold, need, *folded_outer, *folded)
    out = tuple(_unfolded(x, size, has_batch) for x in results)
    return out, tuple(None if x is None else 0 for x in out)
