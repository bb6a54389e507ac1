# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The attention calls: simple functions on arrays.

For one batch entry, query head h, its key/value head g = h // (heads / kv_heads), query row i:

    s[i, j] = softcap(scale * dot(q[i], k[j])) + bias[i, j] - slope[h] * |i + shift - j|
    o[i]    = sum over visible j of exp(s[i, j]) / (sum of exp(s[i, j]) + exp(sink[h])) * v[j]
    lse[i]  = log(sum over visible j of exp(s[i, j]))

Source of the method: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023). The sums are
exact, in float32 at least, in float64 for float64 input.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import refuse_gradients
from .errors import ArgumentError
from .kinds import Array, is_torch
from .options import Options, prepare
from .passes import run_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Array = None,
    alibi_slopes: Array = None,
    softcap: float = 0.0,
    sinks: Array = None,
    q_lengths: Array = None,
    kv_lengths: Array = None,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | Array | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Array = None,
    out_dtype: Any = None,
    backend: str = "auto",
    implementation: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str = "float32",
    stream: Any = None,
) -> Any:
    """Exact attention: softmax(scale * q k^T, masked) v.

    Arrays are NumPy's (bfloat16 of ml_dtypes included) or have DLPack (PyTorch, JAX, CuPy); any
    strides are taken as they are, 0 included. q, k and v have one dtype of float64, float32,
    float16 and bfloat16. `heads` is a multiple of `kv_heads` (GQA, MQA). The call runs where q is:
    on the CPU, or on the NVIDIA GPU whose memory holds it; all arrays are in one place, lists of
    integers are moved there.

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
        bias: added to the scores; broadcasts to (batch, head, q_row, kv_row); the dtype of q,
            float32, or float64 for float64. -inf hides.
        alibi_slopes: (head,) or (batch, head): subtracts slope * |i + shift - j|; constants.
        softcap: cap > 0: cap * tanh(score / cap) before bias and masks; 0: off.
        sinks: (head,): one more logit in each row's denominator.
        q_lengths: (batch,) integers: rows from there on give o = 0 and lse = -inf.
        kv_lengths: (batch,) integers: keys from there on are hidden.
        dropout_p: probability in [0, 1] that an entry is dropped; the kept are scaled up.
        rng: (seed, offset), seed below 2**64, offset below 2**32; required with dropout_p > 0. Or
            an int64 array of the two where q is: on a GPU it is read when the call runs, so that a
            CUDA graph draws anew at each replay.
        layout: "bhsd", "bshd", "hsd", "shd" or "sd": the axes of q, k, v and o. lse is always
            (batch, head, q_row), without the axes that the layout leaves out.
        return_lse: return (o, lse).
        out: array to write o into, of any strides; it may not overlap an input.
        out_dtype: dtype of o: that of q (None), or float32.
        backend: "auto" (where q is), "cpu" or "cuda"; an error if q is elsewhere.
        implementation: "auto"; on the CPU "scalar" (the float64 oracle) or "tiled"; on a GPU
            "naive", "simt", "sm80" or "sm90"; an error if it cannot.
        deterministic: bitwise equal from run to run. The CPU always is.
        batch_invariant: a request's bits do not depend on its neighbours. The CPU always is.
        precision: of the products of float32 q, k and v: "float32", or a permission to use a GPU's
            tensor cores: "3xtf32" (errors like float32's) or "tf32" (inputs rounded to 11
            significant bits). Where no kernel uses it products are exact; `explain` says which.
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
    if type(q) is not np.ndarray and is_torch(q):
        return torch_layer().attention(
            q, k, v, scale, causal, alignment, window, mask, bias, alibi_slopes, softcap, sinks,
            q_lengths, kv_lengths, dropout_p, rng, layout, return_lse, out, out_dtype, backend,
            implementation, deterministic, batch_invariant, precision, stream,
        )  # fmt: skip
    prepared = prepare(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        alignment=alignment,
        window=window,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        dropout_p=dropout_p,
        rng=rng,
        layout=layout,
        backend=backend,
        implementation=implementation,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        precision=precision,
        stream=stream,
    )
    if "torch" in sys.modules:
        refuse_gradients("attention", prepared[2])
    o, lse, _ = run_forward(prepared, return_lse, False, out, out_dtype)
    return (o, lse) if return_lse else o


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
    **options: Unpack[Options],
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
        **options: those of `attention`, and max_q, max_kv: no sequence has more rows or keys.

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
    if type(q) is not np.ndarray and is_torch(q):
        defaults = attention.__kwdefaults__ or {}
        results = {"return_lse": return_lse, "out": out, "out_dtype": out_dtype}
        return torch_layer().attention(
            q, k, v, cu_q=cu_q, cu_kv=cu_kv, **{**defaults, **options, **results}
        )
    prepared = prepare(q, k, v, cu_q=cu_q, cu_kv=cu_kv, **options)
    if "torch" in sys.modules:
        refuse_gradients("attention_varlen", prepared[2])
    o, lse, _ = run_forward(prepared, return_lse, False, out, out_dtype)
    return (o, lse) if return_lse else o


def torch_layer() -> Any:
    """What PyTorch tensors go through: operators that record gradients and compile."""
    # An import statement costs a microsecond; under the compiler a guard would ask again later.
    is_traced = sys.modules["torch"].compiler.is_dynamo_compiling()
    layer = None if is_traced else sys.modules.get("fulmen._torch")
    if layer is None:
        from . import _torch

        layer = _torch
    return layer
