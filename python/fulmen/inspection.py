# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the library would do, and what it is: explanations, the mask as a matrix, the build."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import BACKWARD_RESULTS, FORWARD_RESULTS, call, library, text_of
from .arrays import Array, dtype_name, kind_of, named_dtype
from .errors import ArgumentError
from .options import CallOptions, prepare, split_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Explanation(dict[str, Any]):
    """The implementation chosen, why, and why each other one was not; prints itself.

    Keys: operation, implementation, backend, reason, rejected (a list of implementation and
    reason), tile (rows, columns; or None), isa, threads, workspace_bytes, flops, bytes, intensity.
    """

    @classmethod
    def parse(cls, text: str) -> Explanation:
        """From the JSON object of fulmen_explain."""
        return cls(json.loads(text))

    def __str__(self) -> str:
        tile = self["tile"] and f"tile {self['tile']['rows']} x {self['tile']['columns']}, "
        lines = [
            f"{self['operation']}: {self['implementation']} on {self['backend']}: {self['reason']}",
            *(f"not {other['implementation']}: {other['reason']}" for other in self["rejected"]),
            f"{tile or ''}{self['isa']}, {self['threads']} threads, "
            f"workspace {self['workspace_bytes']} bytes",
            f"{self['flops']:.4g} flops, {self['bytes']:.4g} bytes, "
            f"{self['intensity']:.3g} flops a byte",
        ]
        return "\n".join(lines)


def phantom(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of any size that takes no memory: only for calls that read no array."""
    strides = [np.dtype(dtype).itemsize]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(extent, 1))
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides[-len(shape) :])


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    operation: str = "forward",
    **options: Unpack[CallOptions],
) -> Explanation:
    """Which implementation a call would use, why, and why each other one not. Runs nothing.

    Args:
        q, k, v: arrays as for `fulmen.attention`; only shapes, strides and dtypes matter.
        operation: "forward" or "backward" (for the gradients of q, k and v).
        **options: those of `fulmen.attention_forward`.

    Raises:
        fulmen.Error: as the call would.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 256, 64), np.float32)
    >>> fulmen.explain(x, x, x)["implementation"] in ("tiled", "scalar")
    True
    """
    if operation not in ("forward", "backward"):
        raise ArgumentError(f"operation is {operation!r}; allowed are 'forward', 'backward'")
    numbers, layout, inputs = prepare("", q, k, v, **options)
    dtype = named_dtype(dtype_name(kind_of(q, "q").dtype(q)))
    rows, sums = layout.lse_shape(tuple(q.shape)), np.float64 if dtype.char == "d" else np.float32
    o = phantom((*q.shape[:-1], v.shape[-1]), dtype)
    outputs: tuple[Array, ...] = (o, phantom(rows, sums), None)
    results = FORWARD_RESULTS
    if operation == "backward":
        gradients = (phantom(tuple(x.shape), dtype) for x in (q, k, v))
        outputs = (o, None, phantom((*rows, 2), sums), o, None, *gradients)
        results = BACKWARD_RESULTS

    def explained(text: Array) -> int:
        leading = (text, int(operation == "backward"), *numbers)
        arrays = (*inputs, *outputs)
        return call(library().explain, leading, layout.rows_before_heads, arrays, results)

    return Explanation.parse(text_of(explained))


def dense_mask(
    sq: int,
    skv: int,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Array = None,
    q_lengths: Array = None,
    kv_lengths: Array = None,
    cu_q: Array = None,
    cu_kv: Array = None,
) -> Array:
    """The boolean matrix that the options mean: the definition of their combination.

    Args:
        sq: query rows; packed, the total.
        skv: keys; packed, the total.
        causal, alignment, window, mask, bias, q_lengths, kv_lengths: as in `fulmen.attention`; of
            bias only where it is -inf.
        cu_q, cu_kv: as in `fulmen.attention_varlen`.

    Returns:
        (sq, skv), True where visible; (batch, head, sq, skv) when an option has a batch or head
        axis; packed (sequence, 1, longest q, longest kv).

    Raises:
        fulmen.Error: as `fulmen.attention`. Quadratic in memory: for tests and pictures.

    >>> import fulmen
    >>> fulmen.dense_mask(2, 4, causal=True).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    visible, q_ids = (None, None) if mask is None else split_mask(mask)[2:4]
    batch, heads = _batch_and_heads(visible, bias, q_ids, q_lengths, kv_lengths, cu_q)
    q, k = np.empty((batch, heads, sq, 0), np.float32), np.empty((batch, 1, skv, 0), np.float32)
    v = np.empty((batch, 1, skv, 1), np.float32)
    shape: tuple[int, ...] = (batch, heads, sq, skv)
    if cu_q is not None:
        q, k, v = q[0], k[0], v[0]
        spans = [np.diff(np.asarray(x)) for x in (cu_q, cu_kv)]
        shape = (len(spans[0]), heads, *(int(x.max(initial=0)) for x in spans))
    numbers, _, inputs = prepare(
        "", q, k, v, causal=causal, alignment=alignment, window=window, mask=mask, bias=bias,
        q_lengths=q_lengths, kv_lengths=kv_lengths, cu_q=cu_q, cu_kv=cu_kv,
        layout="bhsd" if cu_q is None else "hsd",
    )  # fmt: skip
    matrix = np.empty(shape, np.uint8)
    call(library().dense_mask, (matrix, *numbers), 0, inputs, range(0))
    seen = matrix.view(np.bool_)
    has_axes = (
        batch * heads > 1
        or cu_q is not None
        or any(len(getattr(x, "shape", ())) > 2 for x in (visible, bias))
    )
    return seen if has_axes else seen[0, 0]


def _batch_and_heads(
    visible: Array, bias: Array, q_ids: Array, q_lengths: Array, kv_lengths: Array, cu_q: Array
) -> tuple[int, int]:
    """The extents of the two leading axes that the options bring."""
    batch = heads = 1
    for x in (visible, bias):
        shape = (1, 1, 1, 1, *np.shape(x))[-4:] if x is not None else (1, 1, 1, 1)
        batch, heads = max(batch, shape[0]), max(heads, shape[1])
    if cu_q is not None:
        return 1, heads
    for lengths in (q_lengths, kv_lengths):
        if lengths is not None:
            batch = max(batch, len(lengths))
    if q_ids is not None and len(np.shape(q_ids)) == 2:
        batch = max(batch, np.shape(q_ids)[0])
    return batch, heads


def build_info() -> dict[str, Any]:
    """What this libfulmen is: version, commit, compiler, build_type, isas, isa in use, threads.

    >>> import fulmen
    >>> sorted(fulmen.build_info())[:2]
    ['build_type', 'commit']
    """
    found: dict[str, Any] = json.loads(text_of(library().build_info))
    return {**found, "library": library().path}
