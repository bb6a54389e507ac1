# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The two passes apart: forward with what backward wants, and the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import BACKWARD_RESULTS, FORWARD_RESULTS, library, run
from .kinds import Array
from .options import CallOptions, Prepared, prepare
from .results import (
    Forward,
    Gradients,
    backward_arrays,
    finished,
    forward_outputs,
    handed_over,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def run_forward(
    prepared: Prepared, with_lse: bool, with_stats: bool, out: Array, out_dtype: Any
) -> tuple[Array, ...]:
    """(o, lse, stats) of a call, in the kind of q; None for what is not asked for."""
    numbers, layout, inputs, where = prepared
    q = inputs[0]
    is_numpy = type(q) is np.ndarray
    outputs: tuple[Array, ...]
    if is_numpy and not with_lse and out is None and out_dtype is None:  # the shortest way
        outputs = (np.empty(q.shape[:-1] + inputs[2].shape[-1:], q.dtype), None, None)
    else:
        outputs = forward_outputs(prepared, with_lse, with_stats, out, out_dtype)
    arrays = inputs + outputs
    rows_first = layout.rows_before_heads
    found = run(library().forward, numbers, where, rows_first, arrays, FORWARD_RESULTS)
    return found if is_numpy else handed_over(q, found, out)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array = None,
    out_dtype: Any = None,
    **options: Unpack[CallOptions],
) -> Forward:
    """The forward pass, with what the backward pass wants.

    Args:
        q, k, v: as in `attention`; with cu_q= and cu_kv= as in `attention_varlen`.
        out: as in `attention`.
        out_dtype: as in `attention`.
        **options: those of `attention`, and cu_q, cu_kv, max_q, max_kv of `attention_varlen`.

    Returns:
        Forward(o, lse, stats).

    Raises:
        fulmen.Error: as `attention`. Tensors that require grad are read, and no gradient recorded.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 4, 8))
    >>> fulmen.attention_forward(x, x, x).stats.shape
    (1, 1, 4, 2)
    """
    prepared = prepare(q, k, v, **options)
    return Forward(*run_forward(prepared, True, True, out, out_dtype))


def attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    stats_or_lse: Array,
    *,
    need: Sequence[str] = ("q", "k", "v"),
    dlse: Array = None,
    **options: Unpack[CallOptions],
) -> Gradients:
    """The gradients of sum(o * do) + sum(lse * dlse).

    Args:
        do: the gradient that arrives through o, as o, of any strides; the dtype of q, or float32.
        q, k, v: as in the forward call.
        o: the result of the forward call.
        stats_or_lse: its stats; or its lse, which is accurate for |lse| < 1000.
        need: which gradients to compute, of "q", "k", "v", "bias" and "sinks"; at least one.
        dlse: the gradient that arrives through lse, as lse; None: none.
        **options: the same as in the forward call, rng included.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks), each with the shape and dtype of what it belongs to;
        None where not needed.

    Raises:
        fulmen.Error: as `attention`; ArgumentError when `need` names what is not there.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 4, 8))
    >>> forward = fulmen.attention_forward(x, x, x)
    >>> gradients = fulmen.attention_backward(x, x, x, x, forward.o, forward.stats, need=("v",))
    >>> gradients.dq is None, float(gradients.dv.sum())
    (True, 32.0)
    """
    prepared = prepare(q, k, v, **options)
    numbers, layout, inputs, where = prepared
    saved, gradients = backward_arrays(prepared, do, o, stats_or_lse, dlse, need)
    arrays = inputs + saved + gradients
    rows_first = layout.rows_before_heads
    found = run(library().backward, numbers, where, rows_first, arrays, BACKWARD_RESULTS)
    return finished(inputs, found)
