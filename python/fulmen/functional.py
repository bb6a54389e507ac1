# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The attention calls: simple functions on arrays.

For one batch entry, query head h, its key/value head g = h // (heads / kv_heads), query row i:

    s[i, j] = softcap(scale * dot(q[i], k[j])) + bias[i, j] - slope[h] * |i + shift - j|
    o[i]    = sum over visible j of exp(s[i, j]) / (sum of exp(s[i, j]) + exp(sink[h])) * v[j]
    lse[i]  = log(sum over visible j of exp(s[i, j]))

Source of the method: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023). The sums are
exact, in float32 at least, in float64 for float64 input. The keywords are listed in keywords.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, TypeVar

import numpy as np

from ._calls import backward_arrays, forward_results, merging, owners_of, part_arrays, run
from ._library import library, schema
from .array_types import Array, NumpyType, array_type_of, is_torch, torch_call
from .errors import ArgumentError, UnsupportedError, flag
from .keywords import RESULT_KEYWORDS, AttentionKeywords, Options, VarlenOptions, takes
from .options import Prepared, prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


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
    dcaptures: dict[str, Array] | None = None  # what an expression reads, by name


def declares(implementation: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a declaration the name, the signature and the documentation of an implementation.

    The implementation gets the keywords that are given, so that a default costs nothing.
    """

    def declared(declaration: F) -> F:
        shown = functools.update_wrapper(implementation, declaration)
        shown.__signature__ = inspect.signature(declaration)  # type: ignore[attr-defined]
        return shown  # type: ignore[return-value]

    return declared


def _refuse_gradients(function: str, names: Sequence[str], arrays: tuple[Array, ...]) -> None:
    """Refuses tensors whose gradient would silently stop in a call on arrays of another type.

    Raises:
        UnsupportedError: a tensor requires grad while gradients are recorded.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, x in zip(names, arrays):
        if is_torch(x) and x.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad and q is no PyTorch tensor, so fulmen.{function} records no "
                f"gradient: pass {name}.detach(), or q as a tensor"
            )


def _attention(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """`attention`, with the keywords that are given."""
    if type(q) is not np.ndarray and is_torch(q):
        return torch_call("attention")(q, k, v, options)
    return_lse = out = out_dtype = None
    if options:
        return_lse, out, out_dtype = (options.pop(name, None) for name in RESULT_KEYWORDS)
        if return_lse is not None:
            return_lse = flag("return_lse", return_lse)
    prepared = prepare(q, k, v, options)
    if "torch" in sys.modules:
        _refuse_gradients("attention", schema().inputs, prepared[1])
    o, lse, _ = _forward(prepared, return_lse, False, out, out_dtype)
    return (o, lse) if return_lse else o


@declares(_attention)
@takes(AttentionKeywords)
def attention(q: Array, k: Array, v: Array, **options: Unpack[AttentionKeywords]) -> Any:
    """Exact attention: softmax(scale * q k^T, masked) v.

    Arrays are NumPy's (those of ml_dtypes included) or have DLPack (PyTorch, JAX, CuPy); any
    strides are taken as they are, 0 included. q, k and v have one dtype of float64, float32,
    float16 and bfloat16; or k and v are quantised, float8_e4m3fn, float8_e5m2 or int8, beside q of
    32 or 16 bits, or of the same 8: their values are q_scale * q, k_scale * k and v_scale * v.
    `heads` is a multiple of `kv_heads` (GQA, MQA). The call runs where q is: on the CPU, or on the
    NVIDIA GPU whose memory holds it; all arrays are in one place, lists of integers are moved
    there.

    Args:
        q: (batch, head, q_row, dim_qk) in the order that `layout` names; dim_qk 0 to 576.
        k: (batch, kv_head, kv_row, dim_qk).
        v: (batch, kv_head, kv_row, dim_v); dim_v 1 to 512.
        scale: factor of the scores; None: 1 / sqrt(dim_qk). 0 and negative numbers are legal.
        causal: row i sees keys j <= i + shift.
        alignment: "bottom_right": shift = kv_len - q_len, the last row is level with the last key;
            "top_left": shift = 0. For causal, window, chunks and ALiBi alike.
        window: None, or (left, right): row i sees keys i + shift - left to i + shift + right,
            both included, None or -1 for no limit; an integer w is (w, 0) when causal, else (w, w).
        mask: a boolean array that broadcasts to (batch, head, q_row, kv_row), True: visible; a
            value of fulmen.masks; or a tuple of these, which must all hold.
        score: what a score becomes: a text, `fulmen.score` of one with the arrays that it reads.
            `mask` takes such texts too, alone or as fulmen.masks.expression.
        bias: added to the scores; broadcasts to (batch, head, q_row, kv_row); the dtype of q,
            float32, or float64 for float64. -inf hides.
        alibi_slopes: (head,) or (batch, head): subtracts slope * |i + shift - j|; constants.
        softcap: cap > 0: cap * tanh(score / cap) before bias and masks; 0: off.
        sinks: (head,): one more logit in each row's denominator.
        q_lengths: (batch,) integers: rows from there on give o = 0 and lse = -inf.
        kv_lengths: (batch,) integers: keys from there on are hidden.
        cu_q, cu_kv, max_q, max_kv: packed sequences, as in `attention_varlen`.
        page_table, page_indptr, kv_start, kv_shared, positions: caches, as in `attention_paged`,
            where a table of rank 1 is a list of pages with the offsets page_indptr.
        q_segments, kv_segments: rows and keys that are parts of a longer sequence: (segment, 3) or
            (batch, segment, 3) integers, up to 64 segments: first row of the call, rows, position
            of the first. These positions take the place of i + shift and j for causal, window,
            masks, ALiBi, dropout and texts; a row or key of no segment takes no part, and one
            without rows says nothing. Arrays with an element for each row or key have those of the
            call. Without kv_segments key j stands at position j. Results of calls on disjoint keys
            merge to that of the whole sequence, and their gradients add up.
        slots: page_table has a row of the pools for each key, -1 where it is hidden.
        dropout_p: probability in [0, 1] that an entry is dropped; the kept are scaled up.
        rng: (seed, offset), seed below 2**64, offset below 2**32; required with dropout_p > 0. Or
            an int64 array of the two where q is: on a GPU it is read when the call runs, so that a
            CUDA graph draws anew at each replay.
        layout: "bhsd", "bshd", "hsd", "shd" or "sd": the axes of q, k, v and o. lse is always
            (batch, head, q_row), without the axes that the layout leaves out.
        return_lse: return (o, lse).
        out: array to write o into, of any strides; it may not overlap an input.
        out_dtype: dtype of o: that of q (None), or float32; with quantised q bfloat16 (None),
            float16 or float32.
        backend: "auto" (where q is), "cpu" or "cuda"; an error if q is elsewhere.
        implementation: "auto"; on the CPU "scalar" (the float64 oracle) or "tiled"; on a GPU
            "naive", "simt", "sm80" or "sm90"; an error if it cannot.
        deterministic: gradients have the same bits in every run, whatever `need` asks for beside
            them. The CPU's always have; o and lse have them everywhere.
        batch_invariant: a request's bits do not depend on its neighbours. The CPU always is.
        precision: of the products of float32 q, k and v: "float32", or a permission to use a GPU's
            tensor cores: "3xtf32" (errors like float32's) or "tf32" (inputs rounded to 11
            significant bits). Of float16 and bfloat16: "fp8", a permission to round them to 8 bits,
            forward. Where no kernel uses it products are exact; `explain` says which.
        q_scale, k_scale, v_scale: of quantised q, k and v: a number, or a float32 array that
            broadcasts to it and has 1 as its last axis: (kv_head, 1, 1) in "bhsd", one a head. Of v
            also one for each dim: (kv_head, 1, dim_v). None: 1. What is not finite makes
            NaN. They have no gradients, nor has a call with quantised arrays.
        stream: on a GPU the address of a CUstream, or a stream of PyTorch or CuPy; None: the
            current stream of PyTorch or CuPy, and for JAX the stream that JAX lends. The call
            returns when its work is enqueued. None on the CPU.

    Returns:
        o as q, with the last axis of v; with return_lse (o, lse), lse being the natural logarithm
        of the row sums in float32 (float64 for float64), without sinks. A row that sees no key has
        o = 0 and lse = -inf.

    Raises:
        fulmen.Error: a precondition does not hold; one sentence says which. Nothing was written.
        UnsupportedError: PyTorch tensors that require grad, among others.

    Any number of threads may call at once.

    >>> import numpy as np, fulmen
    >>> q = np.zeros((1, 2, 3, 4), np.float32)
    >>> v = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    >>> fulmen.attention(q, q[:, :1], v, causal=True)[0, 0]
    array([[0., 1., 2., 3.],
           [2., 3., 4., 5.],
           [4., 5., 6., 7.]], dtype=float32)
    """


@takes(VarlenOptions)
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_kv: Array,
    *,
    return_lse: bool = False,
    out: Array = None,
    out_dtype: Any = None,
    **options: Unpack[VarlenOptions],
) -> Any:
    """Attention of sequences of different lengths, packed one after the other.

    Args:
        q: (total_q, head, dim_qk); `layout="hsd"`: (head, total_q, dim_qk).
        k: (total_kv, kv_head, dim_qk).
        v: (total_kv, kv_head, dim_v).
        cu_q: (sequences + 1,) int32 or int64, first 0, not decreasing: sequence b owns rows
            cu_q[b] to cu_q[b + 1] - 1. Rows past the last offset give o = 0.
        cu_kv: (sequences + 1,): likewise of keys.
        return_lse: return (o, lse), lse being (head, total_q).
        out: as in `attention`.
        out_dtype: as in `attention`.
        **options: those of `attention`; max_q, max_kv: no sequence has more rows or keys.

    Returns:
        As `attention`.

    Raises:
        fulmen.Error: as `attention`; ArgumentError for offsets that decrease or run past the end.

    >>> import numpy as np, fulmen
    >>> x = np.ones((5, 1, 8), np.float16)
    >>> fulmen.attention_varlen(x, x, x, [0, 2, 5], [0, 2, 5], causal=True).shape
    (5, 1, 8)
    """
    if cu_q is None or cu_kv is None:
        raise ArgumentError("cu_q and cu_kv are both needed for packed sequences")
    results = {"return_lse": return_lse, "out": out, "out_dtype": out_dtype}
    return attention(q, k, v, cu_q=cu_q, cu_kv=cu_kv, **results, **options)


def _forward(
    prepared: Prepared,
    with_lse: Any,
    with_stats: bool,
    out: Array,
    out_dtype: Any,
    part: Any = None,
) -> tuple[Array, ...]:
    """(o, lse, stats) of a call, in the type of q; None for what is not asked for."""
    settings, inputs, where = prepared
    q = inputs[0]
    is_numpy = type(q) is np.ndarray
    results: tuple[Array, ...]
    is_plain = is_numpy and q.dtype.itemsize > 1  # of 8 bits: quantised
    if part is not None:
        (settings, *_), _ = merging(prepared)
        results = part_arrays(prepared, part)
    elif is_plain and not with_lse and out is None and out_dtype is None:  # the fast path
        results = (NumpyType.empty(q.shape[:-1] + inputs[2].shape[-1:], q.dtype, q), None, None)
    else:
        results = forward_results(prepared, with_lse, with_stats, out, out_dtype)
    call = library().forward, (settings.problem,), where, settings.layout.code
    found = run(*call, inputs + results, schema().results)
    if part is not None:
        return tuple(part)
    return found if is_numpy else handed_over(q, found, out)


@takes(Options)
def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array = None,
    out_dtype: Any = None,
    accumulate: Forward | None = None,
    **options: Unpack[Options],
) -> Forward:
    """The forward pass, with what the backward pass wants.

    Args:
        q, k, v: as in `attention`; with cu_q= and cu_kv= as in `attention_varlen`.
        out: as in `attention`.
        out_dtype: as in `attention`.
        accumulate: the Forward of the same rows on other keys, o in float32 (float64 for float64),
            lse or None: the result is merged into it where it lies, so that it is that on all
            keys. A row that saw none there has row maximum -inf and row sum 0, and its o may hold
            anything; a row that sees none now stays as it is. sinks are of the last call alone.
            Not of caches; JAX's arrays cannot be written to: fulmen.merge.
        **options: those of `attention`.

    Returns:
        Forward(o, lse, stats); with accumulate that one.

    Raises:
        fulmen.Error: as `attention`. Tensors that require grad are read, and no gradient recorded.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 4, 8))
    >>> fulmen.attention_forward(x, x, x).stats.shape
    (1, 1, 4, 2)
    """
    if accumulate is not None and (out is not None or out_dtype is not None):
        raise ArgumentError("accumulate is given beside out or out_dtype; o is that of accumulate")
    prepared = prepare(q, k, v, options)
    return Forward(*_forward(prepared, True, True, out, out_dtype, accumulate))


@takes(Options)
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
    accumulate: Gradients | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """The gradients of sum(o * do) + sum(lse * dlse).

    Args:
        do: the gradient that arrives through o, as o, of any strides; the dtype of q, or float32.
        q, k, v: as in the forward call.
        o: the result of the forward call.
        stats_or_lse: its stats; or its lse, which is accurate for |lse| < 1000.
        need: which gradients to compute, of "q", "k", "v", "bias", "sinks" and the names of arrays
            that an expression reads; at least one.
        dlse: the gradient that arrives through lse, as lse; None: none.
        accumulate: Gradients with dq, dk and dv in float32 (float64 for float64), those that `need`
            names: the gradients of this call are added to them where they lie; for parts of a
            sequence, with the o and stats of all keys. What is made on a GPU has the dtype of q
            before it is added. JAX's arrays cannot be written to: add them up.
        **options: the same as in the forward call, rng included.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks, dcaptures), each with the shape and dtype of what it
        belongs to, those of an expression's arrays by name; None where not needed. With accumulate
        dq, dk and dv are those.

    Raises:
        fulmen.Error: as `attention`; ArgumentError when `need` names what is not there.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 4, 8))
    >>> forward = fulmen.attention_forward(x, x, x)
    >>> gradients = fulmen.attention_backward(x, x, x, x, forward.o, forward.stats, need=("v",))
    >>> gradients.dq is None, float(gradients.dv.sum())
    (True, 32.0)
    """
    prepared = prepare(q, k, v, options)
    settings, inputs, where = prepared
    if accumulate is not None:
        (settings, *_), _ = merging(prepared)
    arrays = inputs + backward_arrays(prepared, do, o, stats_or_lse, dlse, need, accumulate)
    call = library().backward, (settings.problem,), where, settings.layout.code
    return finished(prepared, run(*call, arrays, schema().gradients), accumulate)


def handed_over(q: Array, results: tuple[Array, ...], out: Array) -> tuple[Array, ...]:
    """The results of a forward pass in the type of q."""
    array_type = array_type_of(q, "q")
    o, lse, stats = (None if x is None else array_type.result(x, q) for x in results)
    return (o if out is None else out), lse, stats


def finished(prepared: Prepared, gradients: tuple[Array, ...], sums: Any = None) -> Gradients:
    """Gradients in the types of what they belong to; those that were added to sums are these."""
    owners = owners_of(prepared)
    found = [
        None if x is None else array_type_of(owner, "").result(x, owner)
        for x, owner in zip(gradients, owners.values())
    ]
    if sums is not None:
        found[:3] = [own if x is not None else None for x, own in zip(found, sums[:3])]
    own = len(Gradients._fields) - 1
    captures = {name: x for name, x in zip([*owners][own:], found[own:]) if x is not None}
    return Gradients(*found[:own])._replace(dcaptures=captures or None)
