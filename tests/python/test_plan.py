# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans: the numbers of the simple calls, memory known before, options that are fixed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import fulmen

GENERATOR = np.random.default_rng(0)
Q, K, V, DO = GENERATOR.standard_normal((4, 2, 4, 33, 16)).astype(np.float32)


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_same_bits_as_the_simple_call(implementation: str) -> None:
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    plan = fulmen.plan(Q, K, V, **options)
    want = fulmen.attention_forward(Q, K, V, **options)
    got = plan.forward(Q, K, V)
    for x, y in zip(got, want):
        np.testing.assert_array_equal(x, y)
    back = fulmen.attention_backward(DO, Q, K, V, want.o, want.stats, **options)
    for x, y in zip(plan.backward(DO, Q, K, V, got.o, got.stats)[:3], back[:3]):
        np.testing.assert_array_equal(x, y)
    assert plan.explain()["implementation"] == implementation
    assert plan.explain("backward")["operation"] == "backward"


def test_forward_only() -> None:
    plan = fulmen.plan(Q, K, V, need=())
    forward = plan.forward(Q, K, V)
    assert forward.stats is None
    np.testing.assert_array_equal(forward.o, fulmen.attention(Q, K, V))
    with pytest.raises(fulmen.ArgumentError, match="no backward pass"):
        plan.backward(DO, Q, K, V, forward.o, forward.lse)
    with pytest.raises(fulmen.ArgumentError, match="no backward pass"):
        plan.explain("backward")


def test_workspace_of_the_caller_is_enough_and_no_less() -> None:
    plan = fulmen.plan(Q, K, V, need=(), implementation="tiled")
    size = plan.workspace_bytes
    assert size > 0
    guarded = np.full(size + 64, 171, np.uint8)
    plan.forward(Q, K, V, workspace=guarded[:size])
    assert (guarded[size:] == 171).all()
    out = np.full(Q.shape, 7, np.float32)
    with pytest.raises(fulmen.ArgumentError, match="workspace"):
        plan.forward(Q, K, V, workspace=guarded[: size - 1], out=out)
    with pytest.raises(fulmen.ArgumentError, match="workspace is not a vector of bytes"):
        plan.forward(Q, K, V, workspace=np.zeros(size, np.float32), out=out)
    assert (out == 7).all()


def test_arrays_may_change_and_options_may_not() -> None:
    lengths = np.array([33, 20], np.int32)
    plan = fulmen.plan(Q, K, V, kv_lengths=lengths)
    other = np.array([5, 33], np.int32)
    got = plan.forward(K, Q, V, kv_lengths=other).o
    np.testing.assert_array_equal(got, fulmen.attention(K, Q, V, kv_lengths=other))
    np.testing.assert_array_equal(
        plan.forward(Q, K, V).o, fulmen.attention(Q, K, V, kv_lengths=lengths)
    )
    with pytest.raises(fulmen.ArgumentError, match="options are fixed"):
        plan.forward(Q, K, V, causal=True)
    with pytest.raises(fulmen.ArgumentError, match="without it"):
        plan.forward(Q, K, V, sinks=np.zeros(4, np.float32))
    with pytest.raises(fulmen.ArgumentError, match="with it"):
        plan.forward(Q, K, V, kv_lengths=None)
    with pytest.raises(fulmen.ArgumentError, match="40"):
        plan.forward(Q, K, V, kv_lengths=np.array([40, 1], np.int32))


@pytest.mark.parametrize(
    ("q", "name"),
    [
        (Q[:1], "q"),
        (Q.astype(np.float64), "q"),
        (np.ascontiguousarray(Q.swapaxes(1, 2)).swapaxes(1, 2), "q"),
    ],
)
def test_an_array_that_differs_is_named(q: Any, name: str) -> None:
    plan = fulmen.plan(Q, K, V, need=())
    out = np.full(Q.shape, 7, np.float32)
    with pytest.raises(fulmen.Error, match=f"{name} .*plan"):
        plan.forward(q, K, V, out=out)
    assert (out == 7).all()


def test_plans_of_packed_sequences_follow_their_offsets() -> None:
    q, k, v = (x[0].swapaxes(0, 1) for x in (Q, K, V))
    cu = np.array([0, 10, 33], np.int32)
    plan = fulmen.plan(q, k, v, need=("q",), cu_q=cu, cu_kv=cu)
    for offsets in (cu, np.array([0, 33, 33], np.int32)):
        got = plan.forward(q, k, v, cu_q=offsets, cu_kv=offsets)
        want = fulmen.attention_varlen(q, k, v, offsets, offsets)
        np.testing.assert_array_equal(got.o, want)


def test_one_plan_in_many_threads() -> None:
    plan = fulmen.plan(Q, K, V)
    want = fulmen.attention(Q, K, V)
    same: list[bool] = []

    def work() -> None:
        for _ in range(30):
            same.append(bool((plan.forward(Q, K, V).o == want).all()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 120
    assert all(same)


def test_plans_are_freed() -> None:
    import resource

    def many() -> int:
        for _ in range(2000):
            fulmen.plan(Q, K, V)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    many()
    before = many()
    assert many() - before < 2048  # KiB: 2000 plans that stay would take more
