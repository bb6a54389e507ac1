# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Parts merged where they lie: what stays, what is written, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen

RNG = np.random.default_rng(28)
Q, K, V = (RNG.standard_normal((2, heads, 40, 16)).astype(np.float32) for heads in (4, 2, 2))


def part_of(*keys: int, **options: Any) -> fulmen.Forward:
    """The Forward of all rows on keys[0] to keys[1]."""
    of_keys = np.s_[:, :, slice(*keys)]
    return fulmen.attention_forward(Q, K[of_keys], V[of_keys], **options)


def nothing() -> fulmen.Forward:
    """A part that has seen no key: its o says nothing."""
    stats = np.zeros((*Q.shape[:3], 2), np.float32)
    stats[..., 0] = -np.inf
    return fulmen.Forward(np.full_like(Q, np.nan), np.full(Q.shape[:3], np.nan, np.float32), stats)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_parts_are_merged_where_they_lie(implementation: str) -> None:
    """The arrays that were given are those of the result, and hold that on all keys."""
    merged = nothing()
    for keys in ((0, 13), (13, 14), (14, 40)):
        found = part_of(*keys, accumulate=merged, implementation=implementation)
        assert found.o is merged.o
        assert found.stats is merged.stats
    whole = part_of(0, 40, implementation=implementation)
    np.testing.assert_allclose(merged.o, whole.o, atol=2e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=2e-6)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_rows_that_see_nothing_stay(implementation: str) -> None:
    """Not a bit of them changes, whatever they hold."""
    merged = part_of(0, 13)
    merged.o[:, 1] = np.nan
    before = [x.copy() for x in merged]
    shown = np.zeros((40, 27), bool)
    shown[::3] = True
    part_of(13, 40, accumulate=merged, mask=shown, implementation=implementation)
    for x, old in zip(merged, before):
        rows = np.arange(40) % 3 != 0
        np.testing.assert_array_equal(x[:, :, rows], old[:, :, rows])
        assert not np.array_equal(x[:, 0, ~rows], old[:, 0, ~rows])


def test_sinks_enter_in_the_last_call() -> None:
    """Also where a row sees nothing then."""
    sinks = np.array([0.5, -3, 9, 0], np.float32)
    merged = part_of(0, 40)
    part_of(0, 1, accumulate=merged, sinks=sinks, mask=np.zeros((1, 1), bool))
    np.testing.assert_allclose(merged.o, part_of(0, 40, sinks=sinks).o, atol=2e-6)


def test_lse_may_be_left_out() -> None:
    """It follows from stats, which carry the part."""
    merged = part_of(0, 13)
    fulmen.attention_forward(
        Q, K[:, :, 13:], V[:, :, 13:], accumulate=fulmen.Forward(merged.o, None, merged.stats)
    )
    np.testing.assert_allclose(merged.o, part_of(0, 40).o, atol=2e-6)


def test_a_plan_merges() -> None:
    """Its runs take the part that they merge into; plans that do not refuse one."""
    plan = fulmen.plan(Q, K, V, need=(), accumulate=True)
    merged = nothing()
    assert plan.forward(Q, K, V, accumulate=merged).o is merged.o
    np.testing.assert_allclose(merged.o, part_of(0, 40).o, atol=2e-6)
    with pytest.raises(fulmen.ArgumentError, match="accumulate is missing and the plan was made"):
        plan.forward(Q, K, V)
    plain = fulmen.plan(Q, K, V, need=())
    with pytest.raises(fulmen.ArgumentError, match="accumulate is given and the plan was made"):
        plain.forward(Q, K, V, accumulate=merged)
    with pytest.raises(fulmen.ArgumentError, match="accumulate is True beside out or out_dtype"):
        fulmen.plan(Q, K, V, accumulate=True, out=merged.o)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no Forward": (Q, {}, "accumulate is .*; the fulmen.Forward of other keys is expected"),
    "no stats": (nothing()._replace(stats=None), {}, "stats is missing; with accumulate = 1"),
    "out": (nothing(), {"out": np.zeros_like(Q)}, "accumulate is given beside out or out_dtype"),
    "caches": (nothing(), {"kv_start": [0, 1]}, "accumulate is 1 beside kv_start"),
    "another shape": (
        nothing()._replace(o=np.zeros((2, 4, 39, 16), np.float32)), {}, "o has shape",
    ),
    "read-only": (
        nothing()._replace(o=np.broadcast_to(np.float32(0), Q.shape)), {}, "o is read-only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Each with its sentence, and nothing is written."""
    part, options, sentence = REFUSED[name]
    with pytest.raises(fulmen.Error, match=sentence):
        fulmen.attention_forward(Q, K, V, accumulate=part, **options)


def test_parts_of_16_bits_are_refused() -> None:
    """They are summed in float32."""
    x = Q.astype(np.float16)
    with pytest.raises(fulmen.DTypeError, match="o is float16 with accumulate = 1; allowed is"):
        fulmen.attention_forward(x, x, x, accumulate=fulmen.attention_forward(x, x, x))


def test_other_calls_name_the_call_that_takes_it() -> None:
    """attention has no such keyword."""
    with pytest.raises(TypeError, match=r"accumulate.* fulmen\.attention_forward"):
        fulmen.attention(Q, K, V, accumulate=nothing())


WHOLE = part_of(0, 40)
DO = RNG.standard_normal(WHOLE.o.shape).astype(np.float32)


def sums() -> fulmen.Gradients:
    """What gradients are added to: anything."""
    given = np.random.default_rng(29)
    return fulmen.Gradients(*(given.standard_normal(x.shape).astype(np.float32) for x in (Q, K, V)))


def added(part: Any, *keys: int, **options: Any) -> fulmen.Gradients:
    """The gradients of keys[0] to keys[1], added to `part`."""
    at = np.s_[:, :, slice(*keys)]
    own = DO, Q, K[at], V[at], WHOLE.o, WHOLE.stats
    return fulmen.attention_backward(*own, accumulate=part, **options)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_gradients_are_added_where_they_lie(implementation: str) -> None:
    """Those of parts to views of what holds those of all."""
    found, before = sums(), sums()
    for first, last in ((0, 13), (13, 14), (14, 40)):
        at = np.s_[:, :, first:last]
        part = fulmen.Gradients(found.dq, found.dk[at], found.dv[at])
        of_part = added(part, first, last, implementation=implementation)
        assert all(x is y for x, y in zip(of_part[:3], part))
    whole = fulmen.attention_backward(DO, Q, K, V, WHOLE.o, WHOLE.stats)
    for x, old, y in zip(found[:3], before, whole):
        np.testing.assert_allclose(x - old, y, atol=2e-5)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_rows_past_a_length_get_nothing(implementation: str) -> None:
    """Not a bit of them changes, of queries and of keys."""
    lengths = {"q_lengths": [40, 9], "kv_lengths": [11, 40], "implementation": implementation}
    forward = fulmen.attention_forward(Q, K, V, **lengths)  # type: ignore[arg-type]
    found, before = sums(), sums()
    fulmen.attention_backward(
        DO,
        Q,
        K,
        V,
        forward.o,
        forward.stats,
        accumulate=found,
        **lengths,  # type: ignore[arg-type]
    )
    np.testing.assert_array_equal(found.dq[1, :, 9:], before.dq[1, :, 9:])
    np.testing.assert_array_equal(found.dk[0, :, 11:], before.dk[0, :, 11:])
    np.testing.assert_array_equal(found.dv[0, :, 11:], before.dv[0, :, 11:])
    assert not np.array_equal(found.dk[0, :, :11], before.dk[0, :, :11])


def test_only_what_is_needed_is_added() -> None:
    """The others may be None, and stay if they are there; dsinks is written as ever."""
    sinks = np.zeros(4, np.float32)
    found = sums()
    made = added(found, 0, 40, need=("v", "sinks"), sinks=sinks)
    assert made.dq is None
    assert made.dk is None
    assert made.dv is found.dv
    np.testing.assert_array_equal(found.dq, sums().dq)
    plain = fulmen.attention_backward(
        DO, Q, K, V, WHOLE.o, WHOLE.stats, need=("sinks",), sinks=sinks
    )
    np.testing.assert_allclose(made.dsinks, plain.dsinks, rtol=1e-5)


def test_a_plan_adds() -> None:
    """Its backward runs take the sums, and o in the dtype of q; its forward runs a part."""
    plan = fulmen.plan(Q, K, V, accumulate=True)
    found, before = sums(), sums()
    made = plan.backward(DO, Q, K, V, WHOLE.o, WHOLE.stats, accumulate=found)
    assert made.dq is found.dq
    whole = fulmen.attention_backward(DO, Q, K, V, WHOLE.o, WHOLE.stats)
    np.testing.assert_allclose(found.dq - before.dq, whole.dq, atol=2e-5)
    with pytest.raises(fulmen.ArgumentError, match="accumulate is missing and the plan was made"):
        plan.backward(DO, Q, K, V, WHOLE.o, WHOLE.stats)
    with pytest.raises(fulmen.ArgumentError, match="gradients of q, k and v are added up"):
        fulmen.plan(Q, K, V, need=("sinks",), sinks=np.zeros(4, np.float32), accumulate=True)


REFUSED_SUMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no Gradients": (Q, {}, "accumulate is .*; the fulmen.Gradients of other parts is expected"),
    "a Forward": (WHOLE, {}, "the fulmen.Gradients of other parts is expected"),
    "no dk": (sums()._replace(dk=None), {}, "need names 'k' and accumulate has no dk"),
    "none of them": (
        sums(), {"need": ("sinks",), "sinks": np.zeros(4, np.float32)},
        "accumulate is 1 without dq, dk and dv",
    ),
    "float64": (sums()._replace(dv=V.astype(np.float64)), {}, "dv is float64 with accumulate = 1"),
    "another shape": (sums()._replace(dq=np.zeros((2, 4, 39, 16), np.float32)), {}, "dq has shape"),
    "read-only": (
        sums()._replace(dq=np.broadcast_to(np.float32(0), Q.shape)), {}, "dq is read-only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_SUMS)
def test_refusals_of_sums(name: str) -> None:
    """Each with its sentence, and nothing is written."""
    part, options, sentence = REFUSED_SUMS[name]
    with pytest.raises(fulmen.Error, match=sentence):
        added(part, 0, 40, **options)


def test_sums_of_16_bits_are_refused() -> None:
    """They are float32."""
    x = Q.astype(np.float16)
    forward = fulmen.attention_forward(x, x, x)
    with pytest.raises(fulmen.DTypeError, match="dq is float16 with accumulate = 1; allowed is"):
        fulmen.attention_backward(
            x, x, x, x, forward.o, forward.stats, accumulate=fulmen.Gradients(x, x, x)
        )


def test_explain_and_warmup_know_it() -> None:
    """The kernel of Hopper that merges; that of Ampere, and wide heads, are refused by name."""
    x = np.zeros((1, 2, 256, 64), np.float16)
    hopper = {"accumulate": True, "device_name": "h100"}
    found = fulmen.explain(x, x, x, implementation="sm90", **hopper)
    assert found["kernels"][-1]["name"].endswith("_accumulate")
    with pytest.raises(fulmen.UnsupportedError, match="sm80: does not take accumulate"):
        fulmen.explain(x, x, x, implementation="sm80", **hopper)
    wide = np.zeros((1, 2, 256, 512), np.float16)
    with pytest.raises(fulmen.UnsupportedError, match="merges parts of rows in head dimensions up"):
        fulmen.explain(wide, wide, wide, implementation="sm90", **hopper)
    for implementation in ("sm90", "sm80", "simt", "naive"):
        found = fulmen.explain(
            x, x, x, implementation=implementation, operation="backward", **hopper
        )
        assert found["kernels"][-1]["name"] == "add_gradients_float16"
    shapes = {"q": Q.shape, "k": K.shape, "v": V.shape}
    fulmen.warmup([{**shapes, "accumulate": True, "backend": "cpu"}])
