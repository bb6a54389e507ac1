# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of the calls: their names, the memory they are written to, and how they come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .arrays import check_out
from .choices import Layout
from .errors import ArgumentError, DTypeError, ShapeError
from .kinds import Array, NumpyKind, dtype_name, kind_of
from .options import Prepared


class Forward(NamedTuple):
    """What `attention_forward` returns and `attention_backward` wants."""

    o: Array  # as q, with the last axis of v
    lse: Array  # (batch, head, q_row), natural logarithm, without the sink; -inf: saw no key
    stats: Array  # (batch, head, q_row, 2), opaque: row maximum and row sum apart


class Gradients(NamedTuple):
    """The gradients that `need` names; None for the others."""

    dq: Array = None  # as q
    dk: Array = None  # as k
    dv: Array = None  # as v
    dbias: Array = None  # as bias: summed over the axes that were broadcast
    dsinks: Array = None  # as sinks


def forward_outputs(
    prepared: Prepared, with_lse: bool, with_stats: bool, out: Array, out_dtype: Any
) -> tuple[Array, Array, Array]:
    """Memory for o, lse and stats, of the kind of q and where it is."""
    _, layout, inputs, (stream, kind) = prepared
    q = inputs[0]
    if stream > 0:  # named by the caller: its allocator must know
        with kind.on(stream, q):
            return _forward_outputs(layout, kind, inputs, with_lse, with_stats, out, out_dtype)
    return _forward_outputs(layout, kind, inputs, with_lse, with_stats, out, out_dtype)


def _forward_outputs(
    layout: Layout,
    kind: type[NumpyKind],
    inputs: tuple[Array, ...],
    with_lse: bool,
    with_stats: bool,
    out: Array,
    out_dtype: Any,
) -> tuple[Array, Array, Array]:
    q = inputs[0]
    dtype = kind.dtype(q)
    shape = q.shape
    if out is not None:
        check_out(out, out_dtype)
        layout.check(out, "out")
        o = out
    else:
        out_type = dtype if out_dtype is None else _output_dtype(kind, dtype, out_dtype)
        o = kind.empty((*shape[:-1], inputs[2].shape[-1]), out_type, q)
    if not with_lse:
        return o, None, None
    rows = layout.lse_shape(shape)
    sums = kind.accumulator(dtype)
    lse = kind.empty(rows, sums, q)
    return o, lse, kind.empty((*rows, 2), sums, q) if with_stats else None


def _output_dtype(kind: type[NumpyKind], dtype: Any, asked: Any) -> Any:
    """The dtype of o by name: that of q, or float32."""
    name, own = dtype_name(asked), dtype_name(dtype)
    if name not in (own, "float32"):
        allowed = " and ".join(dict.fromkeys((own, "float32")))
        raise DTypeError(f"out_dtype is {name} where q is {own}; allowed is {allowed}")
    return kind.dtype_named(name)


def backward_arrays(
    prepared: Prepared, do: Array, o: Array, stats_or_lse: Array, dlse: Array, need: Sequence[str]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """What backward reads beside the inputs, and memory for the gradients."""
    _, layout, inputs, (stream, q_kind) = prepared
    layout.check(do, "do")
    layout.check(o, "o")
    q, k, v, bias, _, _, sinks = inputs[:7]
    owners = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    names = (need,) if isinstance(need, str) else tuple(need)
    if not names:
        raise ArgumentError(
            "need names no gradient; at least one of 'q', 'k', 'v', 'bias', 'sinks' is expected"
        )
    for name in names:
        if name not in owners:
            raise ArgumentError(f"need names {name!r}; allowed are 'q', 'k', 'v', 'bias', 'sinks'")
        if owners[name] is None:
            raise ArgumentError(f"need names {name!r} and {name} is not given")
    rank = len(getattr(stats_or_lse, "shape", ()))
    if rank not in (layout.rank - 1, layout.rank):
        raise ShapeError(
            f"stats_or_lse has {rank} axes; lse has {layout.rank - 1} and stats {layout.rank} with "
            f"layout={layout.name!r}"
        )
    lse, stats = (None, stats_or_lse) if rank == layout.rank else (stats_or_lse, None)
    gradients: list[Array] = []
    with q_kind.on(stream, q):
        for name, owner in owners.items():
            kind = kind_of(owner, name) if name in names else None
            gradients.append(kind and kind.empty(owner.shape, kind.dtype(owner), owner))
    return (o, lse, stats, do, dlse), tuple(gradients)


def finished(inputs: tuple[Array, ...], gradients: tuple[Array, ...]) -> Gradients:
    """Gradients in the kinds of their owners."""
    q, k, v, bias, _, _, sinks = inputs[:7]
    owners = (q, k, v, bias, sinks)
    return Gradients(
        *(
            None if x is None else kind_of(owner, "").result(x, owner)
            for x, owner in zip(gradients, owners)
        )
    )


def handed_over(q: Array, outputs: tuple[Array, ...], out: Array) -> tuple[Array, ...]:
    """The results of a forward pass in the kind of q."""
    kind = kind_of(q, "q")
    o, lse, stats = (None if x is None else kind.result(x, q) for x in outputs)
    return (o if out is None else out), lse, stats
