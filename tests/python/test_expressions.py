# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks as text with NumPy: against options, each way to write them, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.masks import expression

RNG = np.random.default_rng(22)
SHAPE = (2, 3, 11, 8)


def problem(dtype: Any = np.float64) -> list[Any]:
    return [RNG.standard_normal(SHAPE).astype(dtype) for _ in range(3)]


def scaled(q: Any, k: Any) -> Any:
    return q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])


def softmax(s: Any) -> Any:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_score_and_mask_are_what_they_say(implementation: str) -> None:
    q, k, v = problem()
    slope, doc = RNG.random(3), RNG.integers(0, 2, 11)
    o = fulmen.attention(
        q, k, v,
        score=fulmen.score("s - slope[h] * abs(p - j) + $up * b", slope=slope, up=0.5),
        mask=(expression("doc[i] == doc[j] or i == j", doc=doc), "j <= p"),
        implementation=implementation,
    )  # fmt: skip
    i, j = np.ogrid[:11, :11]
    s = scaled(q, k) - slope[:, None, None] * abs(i - j) + 0.5 * np.arange(2)[:, None, None, None]
    seen = ((doc[:, None] == doc) | (i == j)) & (j <= i)
    np.testing.assert_allclose(o, softmax(np.where(seen, s, -np.inf)) @ v, atol=1e-14)


def test_scalars_may_change() -> None:
    q, k, v = problem()
    for level in (0.25, 2, np.float32(0.5)):
        o = fulmen.attention(q, k, v, score=fulmen.score("s * $level", level=level))
        wanted = fulmen.attention(q, k, v, scale=float(level) / np.sqrt(8))
        np.testing.assert_allclose(o, wanted, atol=1e-14)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_gradients_of_what_is_read(implementation: str) -> None:
    q, k, v = problem()
    do = RNG.standard_normal(SHAPE)
    read = {
        "table": RNG.standard_normal((3, 9)),
        "heat": np.array(0.8),
        "row": RNG.standard_normal(11),
        "key": RNG.standard_normal((2, 11)),
    }
    ids = RNG.integers(0, 9, 11)
    text = "s * heat + table[h, clamp(j - p, -4, 4) + 4] * table[0, ids[j]] + row[i] * key[b, j]"

    def options(**changed: Any) -> dict[str, Any]:
        captures = {**read, **changed, "ids": ids}
        return {
            "score": fulmen.score(text, **captures), "causal": True, "softcap": 4.0,
            "implementation": implementation,
        }  # fmt: skip

    forward = fulmen.attention_forward(q, k, v, **options())
    found = fulmen.attention_backward(
        do, q, k, v, forward.o, forward.stats, need=("q", *read), **options()
    )
    assert found.dcaptures is not None
    assert set(found.dcaptures) == set(read)
    assert found.dk is None
    step = 1e-5
    for name, x in read.items():
        way = RNG.standard_normal(x.shape)
        sides = [
            (do * fulmen.attention(q, k, v, **options(**{name: np.asarray(x + side * way)}))).sum()
            for side in (step, -step)
        ]
        wanted = (sides[0] - sides[1]) / (2 * step)
        assert found.dcaptures[name].shape == x.shape
        np.testing.assert_allclose((found.dcaptures[name] * way).sum(), wanted, rtol=1e-6)


def test_gradients_have_the_dtype_of_what_is_read() -> None:
    q, k, v = problem(np.float32)
    table = RNG.standard_normal(11).astype(np.float16)
    options = {"score": fulmen.score("s + table[j]", table=table)}
    forward = fulmen.attention_forward(q, k, v, **options)
    found = fulmen.attention_backward(
        q, q, k, v, forward.o, forward.stats, need=("table",), **options
    )
    assert found.dcaptures is not None
    assert found.dcaptures["table"].dtype == np.float16
    bias = fulmen.attention_backward(
        q, q, k, v, forward.o, forward.stats, need=("bias",), bias=table.astype(np.float32)
    )
    np.testing.assert_allclose(found.dcaptures["table"], bias.dbias, rtol=2e-3, atol=1e-3)


def test_indices_are_clamped() -> None:
    q, k, v = problem()
    table = RNG.standard_normal(4)
    o = fulmen.attention(q, k, v, score=fulmen.score("s + table[j - 3]", table=table))
    bias = table[np.clip(np.arange(11) - 3, 0, 3)]
    np.testing.assert_allclose(o, fulmen.attention(q, k, v, bias=bias), atol=1e-15)


def test_any_strides_and_dtypes_are_read() -> None:
    q, k, v = problem()
    wide = RNG.integers(0, 2, (22, 3))
    for table in (wide[::2, 1], wide[::2, 1] != 0, np.broadcast_to(wide[:1, 1], 11)):
        text = "table[j]" if table.dtype == bool else "table[j] != 0"
        mask = expression(f"{text} or i == j", table=table)
        seen = (table != 0) | np.eye(11, dtype=bool)
        np.testing.assert_array_equal(
            fulmen.attention(q, k, v, mask=mask, implementation="scalar"),
            fulmen.attention(q, k, v, mask=seen, implementation="scalar"),
        )


def test_packed_and_paged() -> None:
    x = RNG.standard_normal((5, 2, 8))
    text = "s + 0.5 * (j - p) + h"
    packed = fulmen.attention_varlen(x, x, x, [0, 2, 5], [0, 2, 5], score=text, mask="j <= p")
    rows = x[2:].swapaxes(0, 1)[None]
    alone = fulmen.attention(rows, rows, rows, score=text, mask="j <= p")
    np.testing.assert_allclose(packed[2:], alone[0].swapaxes(0, 1), atol=1e-14)
    q, k, v = (RNG.standard_normal((1, 2, n, 8)) for n in (1, 12, 12))
    pools = [x.reshape(1, 2, 3, 4, 8).swapaxes(1, 2)[0][[1, 2, 0]] for x in (k, v)]
    o = fulmen.attention_paged(q, *pools, np.array([[2, 0, 1]], np.int32), [12], score=text)
    np.testing.assert_allclose(o, fulmen.attention(q, k, v, score=text), atol=1e-14)


def test_plans_and_masks_as_matrices() -> None:
    q, k, v = problem()
    table = RNG.standard_normal(11)
    options = {"score": fulmen.score("s + table[j]", table=table), "mask": "j <= p"}
    plan = fulmen.plan(q, k, v, need=("q", "table"), **options)
    forward = plan.forward(q, k, v)
    np.testing.assert_array_equal(forward.o, fulmen.attention(q, k, v, **options))
    found = plan.backward(q, q, k, v, forward.o, forward.stats)
    assert found.dcaptures is not None
    wanted = fulmen.attention_backward(
        q, q, k, v, forward.o, forward.stats, need=("table",), **options
    )
    assert wanted.dcaptures is not None
    np.testing.assert_array_equal(found.dcaptures["table"], wanted.dcaptures["table"])
    np.testing.assert_array_equal(
        fulmen.dense_mask(4, 7, mask="j <= p and j != 2"),
        fulmen.dense_mask(4, 7, causal=True) & (np.arange(7) != 2),
    )
    by_head = fulmen.dense_mask(2, 3, mask="j >= h + b", batch=2, heads=2)
    assert by_head.shape == (2, 2, 2, 3)
    assert by_head.sum() == 2 * (3 + 2 + 2 + 1)


def test_a_hidden_pair_may_be_anything() -> None:
    q, k, v = problem()
    score = "s + select(j <= p, 0.0, 0.0 / (i - i)) * 1.0"
    for implementation in ("scalar", "tiled"):
        o = fulmen.attention(q, k, v, score=score, mask="j <= p", implementation=implementation)
        wanted = fulmen.attention(q, k, v, causal=True, implementation=implementation)
        np.testing.assert_allclose(o, wanted, atol=1e-15)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no language": ({"score": "s +"}, "score ends where a value is expected, at column 4"),
    "no text": ({"score": 3}, "score is 3; a str or fulmen.score(...) is expected"),
    "type": ({"score": "j <= i"}, "is true or false; a score is a number"),
    "unused": ({"score": fulmen.score("s", t=np.ones(3))}, "'t' is given, but neither"),
    "unknown": ({"score": "s + t[i]"}, "unknown name 't'"),
    "rank": ({"score": fulmen.score("s + t[i]", t=np.ones((3, 3)))}, "reads it with 1 indices"),
    "no array": ({"score": fulmen.score("s + t[i]", t="x")}, "expression reads arrays and numbers"),
    "bare": ({"score": fulmen.score("s + t", t=np.ones(3))}, "allowed is one element"),
    "empty": ({"score": fulmen.score("s + t[i]", t=np.ones(0))}, "an axis has at least 1"),
    "two": (
        {
            "score": fulmen.score("s + t[i]", t=np.ones(3)),
            "mask": expression("t[i] > 0", t=np.ones(3)),
        },
        "read different t",
    ),
    "number as array": ({"score": fulmen.score("s + t[i]", t=1.0)}, "a scalar: write $t"),
    "many": (
        {"score": fulmen.score(" + ".join(f"t{n}" for n in range(9)),
                               **{f"t{n}": np.ones(1) for n in range(9)})},
        "num_captures is 9; allowed are up to 8",
    ),
    "infinite": ({"score": fulmen.score("s * $t", t=np.inf)}, "any finite number"),
    "dtype": ({"score": fulmen.score("s + t[i]", t=np.ones(11, np.int8))}, "int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, said = REFUSED[name]
    q, k, v = problem()
    with pytest.raises(fulmen.Error) as refusal:
        fulmen.attention(q, k, v, **options)
    assert said in str(refusal.value)


def test_the_caret_is_below_the_fault() -> None:
    with pytest.raises(fulmen.ArgumentError) as refusal:
        fulmen.attention(*problem(), mask="j <= p and doc[i]")
    first, line, caret = str(refusal.value).split("\n")
    assert first.endswith("at column 12:")
    assert line[caret.index("^") :].startswith("doc[i]")


def test_gradients_of_integers_are_refused() -> None:
    q, k, v = problem()
    options = {"score": fulmen.score("s + ids[j]", ids=np.arange(11))}
    forward = fulmen.attention_forward(q, k, v, **options)
    with pytest.raises(fulmen.DTypeError, match="gradients are of floating-point arrays"):
        fulmen.attention_backward(q, q, k, v, forward.o, forward.stats, need=("ids",), **options)
    with pytest.raises(fulmen.ArgumentError, match=r"need names 'other'; allowed are .*'ids'"):
        fulmen.attention_backward(q, q, k, v, forward.o, forward.stats, need=("other",), **options)


def test_gpus_that_are_not_here_have_plans() -> None:
    x = [np.zeros((1, 2, 300, 64), np.float16) for _ in range(3)]
    table = np.zeros(9, np.float32)
    score = fulmen.score("s + table[clamp(j - p, -4, 4) + 4]", table=table)
    told = fulmen.explain(*x, score=score, device_name="h100")
    assert told["implementation"] == "sm90"
    assert told["kernels"][0]["name"].endswith("_own_score")
    told = fulmen.explain(*x, mask="j <= p", device_name="a100", implementation="simt")
    assert told["kernels"][0]["name"].endswith("_own_mask")
    told = fulmen.explain(*x, mask="j <= p", score=score, device_name="a100")
    assert told["implementation"] == "sm80"
    assert [kernel["name"][:10] for kernel in told["kernels"]] == ["mask_tiles", "forward_sm"]
    assert told["kernels"][1]["name"].endswith("_own_score_own_mask_fixed_length")
    told = fulmen.explain(*x, score=score, device_name="a100", operation="backward")
    assert told["implementation"] == "sm80"
    with pytest.raises(fulmen.UnsupportedError, match=r"no order of its own, which deterministic"):
        fulmen.plan(*x, score=score, device_name="h100", need=("q", "table"), deterministic=True)
