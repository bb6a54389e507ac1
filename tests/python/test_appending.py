# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""append_kv, rotary and their tables with NumPy arrays, against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen

DTYPES = ("float64", "float32", "float16", "bfloat16")


def dtype_of(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def rotated(x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Of (..., row, dim), in float64."""
    x, cos, sin = (np.asarray(y, np.float64) for y in (x, cos, sin))
    half = cos.shape[1]
    order = np.arange(2 * half)
    first, second = (order[::2], order[1::2]) if interleaved else (order[:half], order[half:])
    out = x.copy()
    out[..., first] = x[..., first] * cos[positions] - x[..., second] * sin[positions]
    out[..., second] = x[..., second] * cos[positions] + x[..., first] * sin[positions]
    return out


def unit(dtype: Any) -> float:
    bits = {"float64": 52, "float32": 22, "float16": 10, "bfloat16": 7}[np.dtype(dtype).name]
    return 2.0**-bits


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 10, 2])
def test_rotary(name: str, interleaved: bool, rotary_dim: int) -> None:
    rng = np.random.default_rng(rotary_dim)
    dtype = dtype_of(name)
    cos, sin = fulmen.rotary_tables(40, rotary_dim, dtype="float64")
    if name != "float64":
        cos, sin = cos.astype(np.float32), sin.astype(np.float32)
    x = rng.standard_normal((2, 5, 3, 16)).astype(dtype)
    positions = rng.integers(0, 40, (2, 5)).astype(np.int32)
    found = fulmen.rotary(x, positions, cos, sin, interleaved=interleaved, layout="bshd")
    wanted = rotated(np.swapaxes(x, 1, 2), positions[:, None], cos, sin, interleaved)
    wanted = np.swapaxes(wanted, 1, 2)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), wanted, atol=4 * unit(dtype))
    assert np.array_equal(found[..., rotary_dim:], x[..., rotary_dim:])


def test_rows_stand_at_their_number() -> None:
    cos, sin = fulmen.rotary_tables(9, 4)
    x = np.random.default_rng(0).standard_normal((3, 9, 4))
    found = fulmen.rotary(x, None, cos, sin, layout="hsd")
    assert np.array_equal(found, fulmen.rotary(x, np.arange(9), cos, sin, layout="hsd"))
    with pytest.raises(
        fulmen.ArgumentError, match="row 9 of request 0 stands at position 9 by its"
    ):
        fulmen.rotary(np.zeros((3, 10, 4)), None, cos, sin, layout="hsd")


def test_tables_are_computed_in_float64() -> None:
    cos, sin = fulmen.rotary_tables(2**20, 64, base=500000.0)
    place = float(2**20 - 1)
    angle = place * 500000.0 ** (-2 * np.arange(32) / 64)
    assert np.array_equal(cos[-1], np.cos(angle).astype(np.float32))
    assert np.array_equal(sin[-1], np.sin(angle).astype(np.float32))
    cos, _ = fulmen.rotary_tables([0.5, 3], 4, frequencies=[1.0, 0.25], dtype="float16")
    assert np.array_equal(cos, np.cos([[0.5, 0.125], [3, 0.75]]).astype(np.float16))
    for wrong, words in (
        ({"rotary_dim": 5}, "rotary_dim is 5"),
        ({"rotary_dim": 4, "frequencies": [1.0]}, "frequencies has shape"),
        ({"rotary_dim": -2}, "rotary_dim is -2"),
    ):
        with pytest.raises(fulmen.ArgumentError, match=words):
            fulmen.rotary_tables(3, **wrong)


def pools(dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.full((6, 4, 2, 8), np.nan, dtype), np.full((6, 4, 2, 5), np.nan, dtype)


def rows(batch: int = 2, count: int = 3, dtype: Any = np.float32) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((batch, count, 2, dim)).astype(dtype) for dim in (8, 5))


@pytest.mark.parametrize("name", DTYPES)
def test_slots_are_written_and_skipped(name: str) -> None:
    dtype = dtype_of(name)
    (k_pages, v_pages), (k, v) = pools(dtype), rows(dtype=dtype)
    v[0, 0, 0, 0] = np.nan
    slots = np.array([[23, -1, 0], [7, 8, -1]])
    assert fulmen.append_kv(k_pages, v_pages, k, v, slots, layout="bshd") is None
    seen = np.zeros((6, 4), bool)
    for (b, i), slot in np.ndenumerate(slots):
        if slot >= 0:
            assert k_pages[slot // 4, slot % 4].tobytes() == k[b, i].tobytes()
            assert v_pages[slot // 4, slot % 4].tobytes() == v[b, i].tobytes()
            seen[slot // 4, slot % 4] = True
    assert np.isnan(k_pages[~seen].astype(np.float32)).all()


@pytest.mark.parametrize("table", ["padded", "flat", "entries", "batch_index"])
def test_rows_go_behind_the_keys_present(table: str) -> None:
    (k_pages, v_pages), (k, v) = pools(), rows(count=2)
    lengths = np.array([3, 0], np.int32) if table in ("padded", "flat") else np.array([1, 2])
    pages = [[5, 1], [2, 99]]
    given: dict[str, Any] = {
        "padded": {"slots": (pages, lengths)},
        "flat": {"slots": (([0, 2, 3], [5, 1, 2]), lengths)},
        "entries": {"slots": (None, lengths)},
        "batch_index": {"slots": (None, lengths), "batch_index": np.array([3, 2])},
    }[table]
    fulmen.append_kv(k_pages, v_pages, k, v, **given, layout="bshd")
    first = {"entries": [[0], [1]], "batch_index": [[3], [2]]}.get(table, pages)
    for b in range(2):
        for i in range(2):
            place = int(lengths[b]) + i
            assert np.array_equal(k_pages[first[b][place // 4], place % 4], k[b, i])
    assert np.isnan(k_pages[..., 0]).sum() == 2 * (24 - 4)


def test_append_and_attention_see_the_same_cache() -> None:
    rng = np.random.default_rng(2)
    k_pages, v_pages = np.full((2, 7, 3, 1, 8), np.nan, np.float32)
    table, lengths = np.array([[4, 0, 6], [1, 2, 3]]), np.array([0, 0])
    cos, sin = fulmen.rotary_tables(9, 8)
    keys, values, queries = rng.standard_normal((3, 2, 7, 2, 8)).astype(np.float32)
    keys, values = keys[:, :, :1], values[:, :, :1]
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        chunk = slice(begin, end)
        q = fulmen.append_kv(
            k_pages, v_pages, keys[:, chunk], values[:, chunk], (table, lengths), cos=cos, sin=sin,
            q=queries[:, chunk], layout="bshd",
        )  # fmt: skip
        lengths = lengths + end - begin
        o = fulmen.attention_paged(q, k_pages, v_pages, table, lengths, causal=True, layout="bshd")
    turned = [fulmen.rotary(x, None, cos, sin, layout="bshd") for x in (queries, keys)]
    whole = fulmen.attention(*turned, values, causal=True, layout="bshd")
    np.testing.assert_allclose(o, whole[:, 4:], atol=1e-6)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no slots": ({"slots": None}, fulmen.ArgumentError, "slots is None"),
    "three": ({"slots": (1, 2, 3)}, fulmen.ArgumentError, "slots is a tuple of 3"),
    "no lengths": ({"slots": ([[1]], None)}, fulmen.ArgumentError, "kv_lengths is None"),
    "both": ({"batch_index": np.array([0, 1])}, fulmen.ArgumentError, "slots and batch_index"),
    "words": ({"slots": ["a"]}, fulmen.DTypeError, r"slots is \['a'\]"),
    "axes": ({"k_new": np.zeros((2, 8), np.float32)}, fulmen.ShapeError, "k_new has 2 axes"),
    "pool": ({"v_pages": np.zeros((4, 2, 5), np.float32)}, fulmen.ShapeError, "v_pages has 3 axes"),
    "dtype": ({"v_new": np.zeros((2, 3, 2, 5))}, fulmen.DTypeError, "v_new is float64.*k_new"),
    "slot": ({"slots": [[0, 1, 24], [2, 3, 4]]}, fulmen.ArgumentError, "slots has 24.*0 to 23"),
    "flag": ({"interleaved": 2}, fulmen.DTypeError, "interleaved is 2"),
    "stream": ({"stream": 3}, fulmen.UnsupportedError, "the CPU has none"),
    "q": ({"q": np.zeros((2, 3, 2, 8), np.float32)}, fulmen.ArgumentError, "q is given without"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_write_nothing(name: str) -> None:
    wrong, error, words = REFUSALS[name]
    (k_pages, v_pages), (k, v) = pools(), rows()
    given = {
        "k_pages": k_pages, "v_pages": v_pages, "k_new": k, "v_new": v,
        "slots": np.arange(6).reshape(2, 3), "layout": "bshd", **wrong,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        fulmen.append_kv(**given)
    assert np.isnan(k_pages).all()
    assert np.isnan(v_pages).all()


def test_read_only_caches_are_refused() -> None:
    (k_pages, v_pages), (k, v) = pools(), rows()
    v_pages.flags.writeable = False
    with pytest.raises(fulmen.ArgumentError, match="v_pages is read-only"):
        fulmen.append_kv(k_pages, v_pages, k, v, np.arange(6).reshape(2, 3), layout="bshd")


def test_strides_of_pools_are_obeyed() -> None:
    """K and V of a page beside each other, heads outermost, a gap behind each row."""
    memory = np.full((3, 2, 2, 4, 11), np.nan, np.float32)  # (page, k or v, head, row, dim + gap)
    k_pages, v_pages = memory[:, 0, :, :, :8], memory[:, 1, :, :, :8]
    k = np.random.default_rng(4).standard_normal((1, 2, 2, 8)).astype(np.float32)
    fulmen.append_kv(k_pages, v_pages, k, -k, [[11, 0]])
    assert np.array_equal(k_pages[2, :, 3], k[0, :, 0])
    assert np.array_equal(v_pages[0, :, 0], -k[0, :, 1])
    assert np.isnan(memory).sum() == memory.size - 2 * 2 * 2 * 8
