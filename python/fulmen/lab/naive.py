# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The way without fulmen: the whole score matrix in memory, in NumPy.

What `fulmen run` compares time and memory with. Packed sequences are padded to the longest one, as
one does without a kernel for them.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt

import fulmen

from .cases.scores import modified

Array = npt.NDArray[Any]

LARGEST_PAIRS = 1 << 24  # scores beyond this are not computed, only counted


def padded(x: Array, offsets: Array) -> Array:
    """(head, total, dim) -> (sequence, head, longest, dim), zeros behind."""
    lengths = np.diff(offsets)
    out = np.zeros((len(lengths), x.shape[0], int(lengths.max(initial=0)), x.shape[2]), x.dtype)
    for sequence, rows in enumerate(lengths):
        first = int(offsets[sequence])
        out[sequence, :, :rows] = x[:, first : first + int(rows)]
    return out


def matrix_bytes(pairs: int, wide: bool, backward: bool) -> int:
    """Bytes of the score matrices: S and P; backward P, dP and dS."""
    return pairs * (8 if wide else 4) * (3 if backward else 2)


def forward(q: Array, k: Array, v: Array, visible: Array | None, o: Any) -> Any:
    """O and P of dense tensors; `o` are cases.visible.Options, of which masks are in `visible`."""
    s = (q @ k.swapaxes(-1, -2)) * q.dtype.type(o.scale_for(q.shape[-1]))
    s, _ = modified(s, o)
    if o.bias is not None:
        s += o.bias.astype(q.dtype)
    if visible is not None:
        s = np.where(visible, s, q.dtype.type(-np.inf))
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if o.sinks is not None:
        m = np.maximum(m, o.sinks.astype(q.dtype).reshape(-1, 1, 1))
    p = np.exp(s - np.where(m == -np.inf, q.dtype.type(0), m))
    total = p.sum(axis=-1, keepdims=True)
    if o.sinks is not None:
        total += np.exp(o.sinks.astype(q.dtype).reshape(-1, 1, 1) - m)
    p /= np.where(total == 0, q.dtype.type(1), total)
    return p @ v, p


def backward(q: Array, k: Array, v: Array, do: Array, p: Array, o: Array, scale: float) -> Any:
    """Gradients of q, k, v without cap; enough to be timed and weighed."""
    delta = (do * o).sum(axis=-1, keepdims=True)
    ds = p * (do @ v.swapaxes(-1, -2) - delta)
    ds *= q.dtype.type(scale)
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def measure(problem: Any, with_backward: bool) -> dict[str, Any] | None:
    """Time and peak memory of the naive way, or None where its matrices are too large.

    Args:
        problem: cli.run.oracle_problem of a file problem: heads before rows.
        with_backward: the gradients too.
    """
    options = problem.options
    q, k, v, do = problem.q, problem.k, problem.v, problem.do
    wide = np.float64 if q.dtype == np.float64 else np.float32
    if options.cu_q is not None:
        q, do = (None if x is None else padded(x, options.cu_q) for x in (q, do))
        k, v = padded(k, options.cu_kv), padded(v, options.cu_kv)
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if pairs > LARGEST_PAIRS or not pairs or not k.shape[1]:
        return None
    group = q.shape[1] // k.shape[1]
    q = q.astype(wide)
    k, v = (np.repeat(x.astype(wide), group, axis=1) for x in (k, v))
    visible = _visible(problem, q.shape[2], k.shape[2])
    found: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        (o, p), *found["forward"] = _weighed(lambda: forward(q, k, v, visible, options))
        if with_backward:
            wide_do = do.astype(wide)
            _, *found["backward"] = _weighed(
                lambda: backward(q, k, v, wide_do, p, o, options.scale_for(q.shape[3])), p.nbytes
            )
    return {
        name: {"seconds": seconds, "peak_bytes": peak} for name, (seconds, peak) in found.items()
    }


def _visible(problem: Any, q_rows: int, kv_rows: int) -> Array | None:
    o = problem.options
    hides = o.causal or o.window != (-1, -1) or o.masks
    lengths = (o.q_lengths, o.kv_lengths, o.cu_q)
    if not hides and all(x is None for x in lengths):
        return None
    packed = o.cu_q is not None
    total = (problem.q.shape[-2], problem.k.shape[-2]) if packed else (q_rows, kv_rows)
    visible: Array = fulmen.dense_mask(
        *total, causal=o.causal, alignment=o.alignment, window=o.window, mask=o.masks or None,
        q_lengths=o.q_lengths, kv_lengths=o.kv_lengths, cu_q=o.cu_q, cu_kv=o.cu_kv,
    )  # fmt: skip
    return visible


def _weighed(work: Any, held: int = 0) -> tuple[Any, float, int]:
    """A result, the fastest time of three, and the peak of NumPy's memory with what it keeps."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    result = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, sorted(seconds)[1], peak + held
