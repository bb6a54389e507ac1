# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Every precondition that a caller can break: which class, which words, and nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen import masks

F32 = np.float32


def array(*shape: int, dtype: Any = F32) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


Q = array(2, 4, 6, 8)
KV = array(2, 2, 9, 8)
PACKED = array(6, 2, 8)
NAN, INF = float("nan"), float("inf")


def offsets(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


ARGUMENT, SHAPE = fulmen.ArgumentError, fulmen.ShapeError
DTYPE, UNSUPPORTED = fulmen.DTypeError, fulmen.UnsupportedError

# What is changed in a good call; the class; words of the sentence.
BAD: dict[str, tuple[dict[str, Any], type[fulmen.Error], str]] = {
    # arrays
    "q is a list": ({"q": [[1.0]]}, DTYPE, "q is list"),
    "q is missing": ({"q": None}, DTYPE, "q is NoneType"),
    "q has three axes": ({"q": Q[0]}, SHAPE, "q has 3 axes"),
    "k has three axes": ({"k": KV[0]}, SHAPE, "k has 3 axes"),
    "q is integers": ({"q": Q.astype(np.int32)}, DTYPE, "q is int32"),
    "q is of long doubles": ({"q": Q.astype(np.longdouble)}, DTYPE, "q has dtype float128"),
    "q is complex": ({"q": Q.astype(np.complex64)}, DTYPE, "q has dtype complex64"),
    "q is uint16": ({"q": Q.astype(np.uint16)}, DTYPE, "q has dtype uint16"),
    "q is text": ({"q": np.full(Q.shape, "x")}, DTYPE, "q has dtype"),
    "q is objects": ({"q": Q.astype(object)}, DTYPE, "q has dtype object"),
    "q of another byte order": ({"q": Q.astype(">f4")}, DTYPE, "byte order"),
    "dtypes mix": ({"k": KV.astype(np.float16)}, DTYPE, "float16"),
    "dims disagree": ({"k": array(2, 2, 9, 7)}, SHAPE, "dim_qk differs"),
    "batches disagree": ({"k": array(3, 2, 9, 8)}, SHAPE, "batch differs"),
    "v has other rows": ({"v": array(2, 2, 8, 8)}, SHAPE, "kv_row differs"),
    "v has other heads": ({"v": array(2, 1, 9, 8)}, SHAPE, "kv_head differs"),
    "heads do not divide": (
        {"k": array(2, 3, 9, 8), "v": array(2, 3, 9, 8)}, SHAPE, "multiple",
    ),
    "dim_qk too large": (
        {"q": array(2, 4, 6, 577), "k": array(2, 2, 9, 577)}, SHAPE, "0 to 576",
    ),
    "dim_v too large": ({"v": array(2, 2, 9, 513), "out": None}, SHAPE, "1 to 512"),
    "dim_v is 0": ({"v": array(2, 2, 9, 0), "out": None}, SHAPE, "dim 0"),
    "a stride is negative": ({"q": Q[:, :, ::-1]}, ARGUMENT, "negative"),
    # out
    "out has another shape": ({"out": array(2, 4, 6, 7)}, SHAPE, "dim_v differs"),
    "out has another dtype": ({"out": array(2, 4, 6, 8, dtype=float)}, DTYPE, "float64"),
    "out overlaps q": ({"out": Q}, ARGUMENT, "overlap"),
    "out has stride 0": (
        {"out": np.lib.stride_tricks.as_strided(array(1), Q.shape, (0, 0, 0, 0))},
        ARGUMENT, "two of its elements are one",
    ),
    "out is read-only": ({"out": np.broadcast_to(F32(0), Q.shape)}, ARGUMENT, "read-only"),
    "out_dtype says otherwise": ({"out_dtype": "float16"}, DTYPE, "out_dtype"),
    "out_dtype is that of no o": (
        {"out": None, "out_dtype": "float64"}, DTYPE, "float64 where q is float32; allowed",
    ),
    # numbers
    "scale is NaN": ({"scale": NAN}, ARGUMENT, "scale is NaN"),
    "scale is infinite": ({"scale": INF}, ARGUMENT, "scale is inf"),
    "scale is text": ({"scale": "1"}, DTYPE, "scale is str"),
    "scale is an array": ({"scale": array(1)}, DTYPE, "scale is ndarray of float32 (1,)"),
    "scale is beyond float64": ({"scale": 2**1100}, ARGUMENT, "a number of float64"),
    "softcap is negative": ({"softcap": -1.0}, ARGUMENT, "softcap is -1"),
    "softcap is NaN": ({"softcap": NAN}, ARGUMENT, "softcap is nan"),
    "dropout above 1": ({"dropout_p": 1.5, "rng": (0, 0)}, ARGUMENT, "dropout_p is 1.5"),
    "dropout below 0": ({"dropout_p": -0.1}, ARGUMENT, "dropout_p is -0.1"),
    "dropout is NaN": ({"dropout_p": NAN, "rng": (0, 0)}, ARGUMENT, "is nan"),
    "dropout without rng": ({"dropout_p": 0.5}, ARGUMENT, "rng=(seed, offset)"),
    "rng is one number": ({"dropout_p": 0.5, "rng": 3}, DTYPE, "rng is 3"),
    "seed is negative": ({"dropout_p": 0.5, "rng": (-1, 0)}, ARGUMENT, "rng is (-1, 0)"),
    "offset is too large": ({"dropout_p": 0.5, "rng": (0, 2**32)}, ARGUMENT, "2**32"),
    # masks
    "causal is an array": ({"causal": Q}, DTYPE, "causal is ndarray of float32 (2, 4, 6, 8)"),
    "dropout is an array": ({"dropout_p": Q}, DTYPE, "dropout_p is ndarray"),
    "rng of floats": ({"dropout_p": 0.5, "rng": np.ones(2)}, DTYPE, "an int64 array"),
    "backend is an array": ({"backend": Q}, ARGUMENT, "backend is ndarray"),
    "layout is an array": ({"layout": Q}, ARGUMENT, "layout is ndarray"),
    "return_lse is an array": ({"return_lse": Q}, DTYPE, "return_lse is ndarray"),
    "o has no memory": (
        {"q": np.broadcast_to(Q[:, :, :1], (2, 4, 1 << 50, 8)), "out": None},
        fulmen.OutOfMemoryError, "has no memory",
    ),
    "size of chunks is text": ({"mask": masks.Chunks("x")}, DTYPE, "size of masks.chunks is 'x'"),  # type: ignore[arg-type]
    "causal is text": ({"causal": "top_left"}, DTYPE, "alignment="),
    "alignment is unknown": ({"alignment": "top"}, ARGUMENT, "'top_left'"),
    "window right of the diagonal": (
        {"causal": True, "window": (1, 1)}, ARGUMENT, "window_right is 1",
    ),
    "window below -1": ({"window": (-2, 0)}, ARGUMENT, "window_left is -2"),
    "window of three": ({"window": (1, 2, 3)}, ARGUMENT, "window has 3"),
    "window is an array": (
        {"causal": True, "window": np.arange(2)}, DTYPE, "window is ndarray of int64 (2,); None",
    ),
    "window is a float": ({"window": 1.5}, DTYPE, "window is 1.5"),
    "window beyond 64 bits": ({"window": 2**70}, ARGUMENT, "64-bit"),
    "mask does not broadcast": ({"mask": np.ones((6, 8), bool)}, SHAPE, "mask has shape (6, 8)"),
    "mask is not boolean": ({"mask": np.ones((6, 9), F32)}, DTYPE, "mask is float32"),
    "mask is text": ({"mask": "causal"}, ARGUMENT, "mask has the unknown name 'causal'"),
    "mask is a number": ({"mask": 3}, DTYPE, "mask holds int"),
    "mask has five axes": ({"mask": np.ones((1,) * 5, bool)}, SHAPE, "mask has 5 axes"),
    "two boolean masks": ({"mask": (np.ones((6, 9), bool),) * 2}, ARGUMENT, "two boolean"),
    "two prefixes": (
        {"causal": True, "mask": (masks.prefix(1), masks.prefix(2))}, ARGUMENT, "two Pref",
    ),
    "prefix without causal": ({"mask": masks.prefix(1)}, ARGUMENT, "set causal"),
    "prefix is negative": ({"causal": True, "mask": masks.prefix(-1)}, ARGUMENT, "prefix is -1"),
    "chunks of 0": ({"mask": masks.chunks(0)}, ARGUMENT, "size 0"),
    "ids of another length": ({"mask": masks.documents([0] * 5, [0] * 9)}, SHAPE, "q_ids"),
    "ids of floats": (
        {"mask": masks.documents(array(6), array(9))}, DTYPE, "q_ids is float32",
    ),
    # arrays beside
    "bias does not broadcast": ({"bias": array(3, 6, 9)}, SHAPE, "bias"),
    "bias of NumPy's float64": (
        {"bias": np.zeros((6, 9))}, DTYPE, "or (with float64 q) float64: convert it to float32",
    ),
    "bias is a number": ({"bias": 3}, DTYPE, "bias is not an array"),
    "lengths of several lengths": ({"kv_lengths": [[1], [2, 3]]}, DTYPE, "a list of integers"),
    "bias of another dtype": ({"bias": array(6, 9, dtype=np.float16)}, DTYPE, "bias"),
    "slopes of another length": ({"alibi_slopes": array(3)}, SHAPE, "(head = 4) is needed"),
    "sinks of another length": ({"sinks": array(3)}, SHAPE, "sinks"),
    "lengths of another batch": ({"kv_lengths": [1, 2, 3]}, SHAPE, "kv_lengths"),
    "a length is negative": ({"kv_lengths": [-1, 2]}, ARGUMENT, "kv_lengths[0] is -1"),
    "a length past the end": ({"kv_lengths": [10, 2]}, ARGUMENT, "kv_lengths[0] is 10"),
    "q length past the end": ({"q_lengths": [6, 7]}, ARGUMENT, "q_lengths[1] is 7"),
    "lengths are floats": ({"kv_lengths": [1.5, 2]}, DTYPE, "kv_lengths is float64"),
    # who computes
    "layout is unknown": ({"layout": "dhsb"}, ARGUMENT, "'bhsd'"),
    "backend is unknown": ({"backend": "tpu"}, ARGUMENT, "'cpu'"),
    "backend is not there": ({"backend": "cuda"}, ARGUMENT, "host memory"),
    "implementation is unknown": ({"implementation": "fast"}, ARGUMENT, "'tiled'"),
    "implementation of a later GPU": ({"implementation": "sm130"}, ARGUMENT, "'sm90'"),
    "rng has three numbers": ({"rng": np.arange(3), "dropout_p": 0.5}, DTYPE, "two integers"),
    "implementation of a GPU": ({"implementation": "sm90"}, ARGUMENT, "host memory"),
    "stream on the CPU": ({"stream": 1}, UNSUPPORTED, "stream"),
    "precision is unknown": ({"precision": "bf16x3"}, ARGUMENT, "'3xtf32'"),
    "deterministic is text": ({"deterministic": "yes"}, DTYPE, "deterministic"),
}  # fmt: skip

BAD_PACKED: dict[str, tuple[dict[str, Any], type[fulmen.Error], str]] = {
    "offsets decrease": ({"cu_q": offsets(0, 4, 3)}, ARGUMENT, "cu_q"),
    "offsets run past the end": ({"cu_kv": offsets(0, 3, 7)}, ARGUMENT, "cu_kv"),
    "offsets begin late": ({"cu_q": offsets(1, 3, 6)}, ARGUMENT, "cu_q"),
    "numbers of sequences differ": ({"cu_q": offsets(0, 6)}, SHAPE, "cu_"),
    "offsets are floats": ({"cu_q": array(3)}, DTYPE, "cu_q is float32"),
    "offsets are empty": ({"cu_q": [], "cu_kv": []}, SHAPE, "cu_q"),
    "only cu_q": ({"cu_kv": None}, ARGUMENT, "cu_kv"),
    "max_q is too small": ({"max_q": 1}, ARGUMENT, "max_q"),
    "max_kv is negative": ({"max_kv": -1}, ARGUMENT, "max_kv"),
    "layout of a batch": ({"layout": "bshd"}, ARGUMENT, "'shd'"),
}


@pytest.mark.parametrize("name", BAD)
def test_forward(name: str) -> None:
    changes, error, words = BAD[name]
    out = np.full((2, 4, 6, 8), 7, F32)
    call = {"q": Q, "k": KV, "v": KV, "out": out, **changes}
    target = call["out"]
    before = None if target is None else target.copy()
    q, k, v = (call.pop(x) for x in "qkv")
    with pytest.raises(error) as caught:
        fulmen.attention(q, k, v, **call)
    judge(caught.value, error, words)
    if before is not None:
        np.testing.assert_array_equal(target, before)


@pytest.mark.parametrize("name", BAD_PACKED)
def test_packed(name: str) -> None:
    changes, error, words = BAD_PACKED[name]
    out = np.full(PACKED.shape, 7, F32)
    call = {"cu_q": offsets(0, 2, 6), "cu_kv": offsets(0, 3, 6), "out": out, **changes}
    with pytest.raises(error) as caught:
        fulmen.attention_forward(PACKED, PACKED, PACKED, **call)
    judge(caught.value, error, words)
    assert (out == 7).all()


def judge(error: fulmen.Error, kind: type[fulmen.Error], words: str) -> None:
    """The class itself and not one below, and one sentence with the words."""
    text = str(error)
    assert type(error) is kind, text
    assert words in text
    # Of a score or mask in text a sentence, its line and a caret.
    assert text.count("\n") == (2 if text.endswith("^") else 0)
    assert len(text.split()) >= 5
    assert not text.endswith(".")


GOOD = fulmen.attention_forward(Q, KV, KV)
BAD_BACKWARD: dict[str, tuple[dict[str, Any], type[fulmen.Error], str]] = {
    "need nothing": ({"need": ()}, ARGUMENT, "gradient"),
    "need is a number": ({"need": 3}, DTYPE, "need is 3; a list of words such as ('q', 'k', 'v')"),
    "need holds a number": ({"need": ("q", 3)}, DTYPE, "need is ('q', 3)"),
    "stats is missing": ({"stats": None}, DTYPE, "stats_or_lse is None"),
    "need is unknown": ({"need": ("w",)}, ARGUMENT, "'w'"),
    "need bias without one": ({"need": ("bias",)}, ARGUMENT, "bias is not given"),
    "need sinks without them": ({"need": "sinks"}, ARGUMENT, "need"),
    "do has another shape": ({"do": array(2, 4, 6, 7)}, SHAPE, "do has shape"),
    "do has another rank": ({"do": array(6, 8)}, SHAPE, "do has 2 axes"),
    "do has another dtype": ({"do": array(2, 4, 6, 8, dtype=float)}, DTYPE, "do is float64"),
    "o has another shape": ({"o": array(2, 4, 5, 8)}, SHAPE, "o "),
    "stats have another rank": ({"stats": array(6)}, SHAPE, "stats_or_lse has 1"),
    "stats have another shape": ({"stats": array(2, 4, 6, 3)}, SHAPE, "stats"),
    "lse has another dtype": ({"stats": array(2, 4, 6, dtype=float)}, DTYPE, "lse"),
    "dlse has another shape": ({"dlse": array(2, 4, 5)}, SHAPE, "dlse"),
    "softcap is negative": ({"softcap": -1.0}, ARGUMENT, "softcap"),
}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_backward(name: str) -> None:
    changes, error, words = BAD_BACKWARD[name]
    call = {"do": Q, "o": GOOD.o, "stats": GOOD.stats, **changes}
    do, o, stats = (call.pop(x) for x in ("do", "o", "stats"))
    with pytest.raises(error) as caught:
        fulmen.attention_backward(do, Q, KV, KV, o, stats, **call)
    judge(caught.value, error, words)


BAD_MERGE: dict[str, tuple[dict[str, Any], type[fulmen.Error], str]] = {
    "no parts": ({"parts": []}, ARGUMENT, "at least one"),
    "a part is an array": ({"parts": [Q]}, ARGUMENT, "parts[0] is no pair"),
    "parts is a number": ({"parts": 3}, DTYPE, "parts is 3; pairs (o, lse) are expected"),
    "lse of a part is missing": ({"parts": [(Q, None)]}, DTYPE, "lse of parts[0] is None"),
    "o of a later part is a list": (
        {"parts": [(Q, GOOD.lse), ([1.0], GOOD.lse)]}, DTYPE, "o of parts[1] is [1.0]",
    ),
    "out_dtype is unknown": (
        {"parts": [(Q, GOOD.lse)], "out_dtype": "float16"}, DTYPE, "allowed is float32",
    ),
    "a part without lse": ({"parts": [(Q,)]}, ARGUMENT, "parts[0] is no pair"),
    "parts of other shapes": (
        {"parts": [(Q, GOOD.lse), (Q[:, :, :5], GOOD.lse[:, :, :5])]}, SHAPE, "part",
    ),
    "lse of another shape": ({"parts": [(Q, GOOD.lse[:, :, :5])]}, SHAPE, "lse"),
    "o is integers": ({"parts": [(Q.astype(np.int32), GOOD.lse)]}, DTYPE, "int32"),
    "sinks of another length": (
        {"parts": [(Q, GOOD.lse)], "sinks": array(3)}, SHAPE, "sinks",
    ),
    "layout is unknown": ({"parts": [(Q, GOOD.lse)], "layout": "x"}, ARGUMENT, "'bhsd'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MERGE)
def test_merge(name: str) -> None:
    changes, error, words = BAD_MERGE[name]
    with pytest.raises(error) as caught:
        fulmen.merge(**changes)
    judge(caught.value, error, words)


# Functions beside the attention calls; the class; words of the sentence.
BAD_BESIDE: dict[str, tuple[Any, type[fulmen.Error], str]] = {
    "device_name with NUL": (
        lambda: fulmen.explain(Q, KV, KV, device_name="h1\0"), ARGUMENT, "without NUL",
    ),
    "device_name of half a character": (
        lambda: fulmen.explain(Q, KV, KV, device_name="\ud800"), ARGUMENT, "UTF-8",
    ),
    "device beyond 31 bits": (lambda: fulmen.plan(Q, KV, KV, device=2**32), ARGUMENT, "device is"),
    "operation is an array": (
        lambda: fulmen.explain(Q, KV, KV, operation=Q), ARGUMENT, "operation is ndarray",  # type: ignore[arg-type]
    ),
    "without is a number": (lambda: fulmen.plan(Q, KV, KV, without=3), DTYPE, "without is 3"),  # type: ignore[arg-type]
    "tile is bytes": (lambda: fulmen.plan(Q, KV, KV, tile=b"x"), DTYPE, "tile is b'x'"),  # type: ignore[arg-type]
    "workspace is a number": (
        lambda: fulmen.plan(Q, KV, KV, need=()).forward(Q, KV, KV, workspace=3), DTYPE,
        "workspace is 3",
    ),
    "a prefix of a half": (lambda: masks.prefix(0.5), DTYPE, "n of masks.prefix is 0.5"),  # type: ignore[arg-type]
    "rows of a matrix are text": (lambda: fulmen.dense_mask("a", 3), DTYPE, "sq is 'a'"),  # type: ignore[arg-type]
    "a matrix without memory": (
        lambda: fulmen.dense_mask(1 << 40, 1 << 20), fulmen.OutOfMemoryError, "has no memory",
    ),
    "problems is a number": (lambda: fulmen.warmup(3), DTYPE, "problems is 3"),  # type: ignore[arg-type]
    "a problem is text": (lambda: fulmen.warmup(["q"]), DTYPE, "a problem is 'q'"),  # type: ignore[list-item]
    "an extent of 22 digits": (
        lambda: fulmen.warmup([{"q": (1, 1, 10**21, 8), "k": (1,), "v": (1,), "backend": "cpu"}]),
        ARGUMENT, "a 64-bit integer",
    ),
    "a shape beyond memory": (
        lambda: fulmen.warmup([{"q": (1, 1, 2**62, 8), "k": (1,), "v": (1,), "backend": "cpu"}]),
        SHAPE, "no memory has 2^62 bytes",
    ),
    "path is a number": (lambda: fulmen.load_bundle(3), DTYPE, "path is 3"),  # type: ignore[arg-type]
    "path obeyed by a terminal": (
        lambda: fulmen.load_bundle("\x1b[31m"), fulmen.Error, "the bundle \\x1b[31m",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BESIDE)
def test_beside(name: str) -> None:
    call, error, words = BAD_BESIDE[name]
    with pytest.raises(error) as caught:
        call()
    judge(caught.value, type(caught.value) if error is fulmen.Error else error, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_causal", "here it is causal=True; torch's corner is alignment='top_left'"),
        ("attn_mask", "mask= a boolean array, or bias= an array that is added"),
        ("softmax_scale", "here it is scale="),
        ("casual", "here it is causal="),
        ("zzz", "help(fulmen.attention) lists them"),
    ],
)
def test_a_word_that_is_no_option(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}' is no keyword here") as caught:
        fulmen.attention(Q, KV, KV, **{name: True})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (fulmen.ShapeError, ValueError),
        (fulmen.DTypeError, TypeError),
        (fulmen.UnsupportedError, NotImplementedError),
        (fulmen.DeviceError, RuntimeError),
        (fulmen.CompileError, RuntimeError),
        (fulmen.LibraryNotFound, ImportError),
        (fulmen.OutOfMemoryError, MemoryError),
    ],
)
def test_each_error_is_the_builtin_that_fits(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, fulmen.Error)
