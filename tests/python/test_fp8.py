# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""precision="fp8": where it is a permission that nothing uses, and what becomes of q, k and v."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fulmen
from fulmen.array_types import named_dtype
from fulmen.lab.cases import arithmetic
from fulmen.layouts import phantom

RANDOM = np.random.default_rng(5)


def test_on_the_cpu_nothing_is_rounded() -> None:
    q, k, v = RANDOM.standard_normal((3, 1, 2, 40, 32)).astype(ml_dtypes.bfloat16)
    exact, permitted = (fulmen.attention(q, k, v, precision=p) for p in ("float32", "fp8"))
    assert (exact == permitted).all()
    forward = fulmen.attention_forward(q, k, v, precision="fp8")
    gradients = fulmen.attention_backward(
        q, q, k, v, forward.o, forward.stats, precision="fp8", need=("q",)
    )
    assert gradients.dq is not None
    assert np.isfinite(gradients.dq.astype(float)).all()


def test_explain_says_what_is_rounded_and_what_is_not() -> None:
    shape = (1, 8, 16384, 256)

    def said(**options: Any) -> str:
        x = phantom(shape, named_dtype("bfloat16"))
        plan = fulmen.plan(x, x, x, need=(), device_name="h100", precision="fp8", **options)
        return str(plan.explain())

    assert "rounded to e4m3" in said()
    assert "precision fp8 is not used: its kernel takes float8_e4m3fn with" in said(softcap=5.0)


def test_float32_is_not_rounded_to_8_bits() -> None:
    q = np.ones((1, 1, 4, 16), np.float32)
    with pytest.raises(fulmen.ArgumentError, match=r"precision is fp8.*float16 and bfloat16"):
        fulmen.attention(q, q, q, precision="fp8")
    e = q.astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(fulmen.ArgumentError, match=r"are float8_e4m3fn; leave it float32"):
        fulmen.attention(e, e, e, precision="fp8")


@pytest.mark.parametrize("dim", [16, 80, 96, 128])
def test_the_rotation_is_orthogonal(dim: int) -> None:
    x = RANDOM.standard_normal((5, dim))
    y = arithmetic.rotated(x)
    assert np.allclose((y**2).sum(axis=1), (x**2).sum(axis=1))
    assert np.allclose(arithmetic.rotated(y), x)


def test_outliers_err_by_a_third_of_what_they_do_with_one_scale() -> None:
    rows, keys, dim = 64, 4096, 128
    q, k, v = (RANDOM.standard_normal((n, dim)) for n in (rows, keys, keys))
    hot = np.arange(0, dim, 16)
    k[:, hot] += 8 * np.sign(RANDOM.standard_normal(len(hot)))
    q[:, hot] *= 3
    v *= np.exp(0.8 * RANDOM.standard_normal(dim))

    def softmax(s: np.ndarray) -> np.ndarray:
        e = np.exp(s - s.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def error(q8: np.ndarray, k8: np.ndarray, v8: np.ndarray) -> float:
        p = softmax(q8 @ k8.T / np.sqrt(dim))
        p8 = (256 * p / p.max(axis=1, keepdims=True)).astype(ml_dtypes.float8_e4m3fn).astype(float)
        exact = softmax(q @ k.T / np.sqrt(dim)) @ v
        o = p8 @ v8 / p8.sum(axis=1, keepdims=True)
        return float(np.sqrt(((o - exact) ** 2).mean() / (exact**2).mean()))

    tensors = error(
        *(arithmetic.rounded_to_8_bits(x, float(abs(x).max()) / 448) for x in (q, k, v))
    )
    ours = error(*arithmetic.rounded_queries_and_keys(q, k), arithmetic.rounded_values(v))
    assert ours < tensors / 3, (ours, tensors)
