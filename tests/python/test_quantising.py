# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.quantise and hadamard: layouts, a cache that grows, what they refuse.

The definition is judged by the named cases (fulmen.lab.cases.rounded).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fulmen
from fulmen.errors import ArgumentError, DTypeError, ShapeError
from fulmen.lab.cases import find
from fulmen.lab.cases.run import run_case

RNG = np.random.default_rng(7)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def bits(x: Any) -> Any:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("case", [case for case in find("rounded_*") if case.dim <= 80])
def test_cases(case: Any):
    outcome = run_case(case, implementation="tiled")
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("per", ["tensor", "head", "row", "channel"])
def test_layouts(per: str):
    x = RNG.standard_normal((2, 3, 20, 24)).astype(np.float32)
    how: dict[str, Any] = {"per": per, "rotate": True, "constant": "mean"}
    expected = fulmen.quantise(x, **how)
    assert expected.values.dtype == E4M3
    swapped = fulmen.quantise(x.swapaxes(1, 2), layout="bshd", **how)
    assert np.array_equal(
        bits(np.ascontiguousarray(swapped.values.swapaxes(1, 2))), bits(expected.values)
    )
    assert np.array_equal(swapped.scale.swapaxes(1, 2), expected.scale)
    assert np.array_equal(swapped.constant.swapaxes(1, 2), expected.constant)
    one = fulmen.quantise(x[0, 0], layout="sd", **how)
    if per != "tensor":
        assert np.array_equal(bits(one.values), bits(expected.values[0, 0]))
        assert np.array_equal(one.scale, expected.scale[0, 0])


def test_a_cache_that_grows():
    """What the page on precision tells: a prompt, tokens behind it, decoding from the cache."""
    q, k, v = RNG.standard_normal((3, 1, 2, 200, 64)).astype(np.float32)
    k[..., ::16] += 9
    exact = fulmen.attention(
        q[:, :, -1:].astype(np.float64), *(x.astype(np.float64) for x in (k, v))
    )
    keys = fulmen.quantise(k[:, :, :150], rotate=True, constant="mean", headroom=8)
    values = fulmen.quantise(v[:, :, :150], headroom=8)
    later = fulmen.quantise(k[:, :, 150:], rotate=True, constant=keys.constant, scale=keys.scale)
    more = fulmen.quantise(v[:, :, 150:], scale=values.scale)
    k8, v8 = (
        np.concatenate([a.values, b.values], axis=2) for a, b in ((keys, later), (values, more))
    )
    scales = {"k_scale": keys.scale, "v_scale": values.scale}
    o, lse = fulmen.attention(fulmen.hadamard(q[:, :, -1:]), k8, v8, return_lse=True, **scales)
    plain = fulmen.quantise(k, per="tensor")
    coarse = fulmen.attention(
        q[:, :, -1:], plain.values, v8, k_scale=plain.scale, v_scale=values.scale
    )
    error = np.linalg.norm(o - exact) / np.linalg.norm(exact)
    assert error < 0.12
    assert np.linalg.norm(coarse - exact) / np.linalg.norm(exact) > 1.5 * error
    missing = 64**-0.5 * (q[:, :, -1:] * keys.constant).sum(axis=-1)
    s = np.einsum("bhqd,bhkd->bhqk", q[:, :, -1:].astype(np.float64), k) * 64**-0.5
    assert abs(lse + missing - np.log(np.exp(s - 30).sum(axis=-1)) - 30).max() < 0.1


def test_pages_take_what_is_rotated():
    """append_kv stores the same numbers of rows that hadamard rotated."""
    k, v = RNG.standard_normal((2, 1, 2, 8, 32)).astype(np.float32)
    keys = fulmen.quantise(k, rotate=True, constant="mean", headroom=2)
    values = fulmen.quantise(v)
    k_pages, v_pages = np.zeros((2, 2, 2, 4, 32), E4M3)
    rotated = fulmen.hadamard(k, constant=keys.constant)
    slots = np.arange(8)[None]
    fulmen.append_kv(k_pages, v_pages, rotated, v, slots, k_scale=keys.scale, v_scale=values.scale)
    stored = np.ascontiguousarray(k_pages.swapaxes(0, 1).reshape(1, 2, 8, 32))
    assert np.array_equal(bits(stored), bits(keys.values))


def test_hadamard_undoes_itself():
    x = RNG.standard_normal((2, 5, 96)).astype(np.float32)
    np.testing.assert_allclose(
        fulmen.hadamard(fulmen.hadamard(x, layout="hsd"), layout="hsd"), x, atol=1e-5
    )
    half = fulmen.hadamard(x.astype(np.float16), layout="hsd")
    assert half.dtype == np.float16


X = np.ones((1, 2, 4, 8), np.float32)
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (X, {"dtype": "float16"}, DTypeError, "dtype is 'float16'; allowed are float8_e4m3fn"),
    (X.astype(np.float64), {}, DTypeError, "x is float64; allowed is float32, float16 or bfloat16"),
    (X, {"per": "block"}, ArgumentError, "per is 'block'; allowed are 'tensor', 'head', 'row'"),
    (X, {"constant": "median"}, ArgumentError, "constant is 'median'; allowed are None, 'mean'"),
    (X, {"scale": "auto"}, ArgumentError, "scale is 'auto'; allowed are None, a number"),
    (X, {"headroom": 0.5}, ArgumentError, "headroom is 0.5; allowed are finite numbers from 1 on"),
    (X, {"headroom": "8"}, DTypeError, "headroom is '8'; a number from 1 on is expected"),
    (X, {"lengths": [5]}, DTypeError, "lengths"),
    (X, {"lengths": np.array([5])}, ArgumentError, r"lengths\[0\] is 5; allowed is 0 to 4"),
    (X, {"scale": np.ones((1, 2, 4, 8), np.float32)}, ShapeError, "each row and each dim"),
    (X, {"scale": np.ones((1, 3, 1, 1), np.float32)}, ShapeError, "scale has shape"),
    (X, {"scale": np.ones(1)}, DTypeError, "scale is float64; allowed is float32"),
    (X, {"constant": np.ones((1, 2, 4, 8), np.float32)}, ShapeError, "constant has shape"),
    (np.ones((1, 2, 513), np.float32), {"layout": "hsd"}, ShapeError, "rows of 513 numbers"),
    (X[0], {}, ShapeError, "x has 3 axes"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_refusals(row: int):
    x, options, error, said = REFUSED[row]
    with pytest.raises(error, match=said):
        fulmen.quantise(x, **options)


def test_hadamard_refuses():
    with pytest.raises(DTypeError, match="x is int32"):
        fulmen.hadamard(np.ones((1, 1, 2, 4), np.int32))
