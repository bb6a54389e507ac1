# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls with lengths, pages, lse and out, runs of plans: in one step of PyTorch's dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_paged import problem

import fulmen
from fulmen._torch import api, fast_path, ops
from fulmen.array_types import TORCH_CALLS

pytestmark = pytest.mark.skipif(
    not ops.has_kernels(), reason="this PyTorch is older than 2.10: it takes no kernels"
)

CASES: dict[str, dict[str, Any]] = {
    "lse": {"return_lse": True},
    "lengths": {"q_lengths": torch.tensor([2, 0, 1]), "causal": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "window": (3, 0)},
    "start": {"kv_start": torch.tensor([2, 0, 1], dtype=torch.int32)},
    "positions": {
        "positions": torch.tensor([[9, 10], [0, 0], [1, 4]], dtype=torch.int32),
        "causal": True,
    },
    "deterministic": {"deterministic": True, "batch_invariant": True, "softcap": 3.0},
}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What came of each attempt of the fast path: True where it gave a result."""
    seen: list[bool] = []

    def watched(function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            seen.append(found is not None)
            return found

        return call

    monkeypatch.setattr(api, "fast_attention", watched(fast_path.fast_attention))
    monkeypatch.setitem(TORCH_CALLS, "planned", watched(fast_path.fast_planned))
    return seen


def same(found: Any, expected: Any) -> None:
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected))):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("into", [False, True])
def test_both_ways_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, ways: list[bool], name: str, into: bool
) -> None:
    q, k, v, table, lengths = problem()
    options = dict(CASES[name])
    if into:
        options["out"] = torch.full_like(q, torch.nan)
    fast = fulmen.attention_paged(q, k, v, table, lengths, **options)
    assert ways == [True]
    if into:
        assert (fast[0] if isinstance(fast, tuple) else fast) is options["out"]
        options["out"] = torch.full_like(q, torch.nan)
    monkeypatch.setattr(api, "fast_attention", lambda *_: None)
    same(fast, fulmen.attention_paged(q, k, v, table, lengths, **options))


def test_packed_queries_have_the_layout_of_packed_queries(ways: list[bool]) -> None:
    q, k, v, table, lengths = problem()
    cu_q = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    packed = q.transpose(1, 2).flatten(0, 1)
    tokens = [x.transpose(1, 2) for x in (k, v)]
    for _ in range(2):  # the second finds the options kept
        o = fulmen.attention_paged(packed, *tokens, table, lengths, cu_q=cu_q, causal=True)
        plain = fulmen.attention_paged(q, k, v, table, lengths, causal=True)
        same(o, plain.transpose(1, 2).flatten(0, 1))
    assert ways == [True] * 4


@pytest.mark.parametrize("need", [(), ("q", "k", "v")])
def test_a_run_of_a_plan_goes_the_same_way(
    monkeypatch: pytest.MonkeyPatch, ways: list[bool], need: tuple[str, ...]
) -> None:
    q, k, v, table, lengths = problem()
    given: dict[str, Any] = {} if need else {"page_table": table, "kv_lengths": lengths}
    if need:
        k, v = (torch.randn(3, 2, 11, 16) for _ in "kv")
        given = {"sinks": torch.randn(4)}
    plan = fulmen.plan(q, k, v, need=need, **given)
    new = {name: x.clone() for name, x in given.items()}
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    out = torch.full_like(q, torch.nan)
    runs: list[dict[str, Any]] = [{}, new, {"workspace": workspace, "out": out}]
    found = [plan.forward(q, k, v, **run) for run in runs]
    assert ways == [True] * 3
    assert found[2].o is out
    monkeypatch.setitem(TORCH_CALLS, "planned", lambda *_: None)
    for forward, run in zip(found, runs):
        same(
            forward,
            plan.forward(q, k, v, **{**run, **({"out": out.clone()} if "out" in run else {})}),
        )


def test_what_is_recorded_or_refused_is_left_to_the_general_way(ways: list[bool]) -> None:
    q, k, v, table, lengths = problem()
    keys = [torch.randn(3, 2, 5, 16) for _ in "kv"]
    sinks = torch.randn(4, requires_grad=True)
    fulmen.attention(q, *keys, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    with pytest.raises(fulmen.UnsupportedError, match="requires grad"):
        fulmen.attention_paged(q.requires_grad_(), k, v, table, lengths)
    q = q.detach()
    with pytest.raises(fulmen.ArgumentError, match="kv_lengths"):
        fulmen.attention_paged(q, k, v, table, lengths + 99)
    with pytest.raises(fulmen.ShapeError, match="o has rank 1"):
        fulmen.attention(q, *keys, out=torch.empty(2))
    plan = fulmen.plan(q, *keys, need=())
    with pytest.raises(fulmen.ShapeError, match="make a plan"):
        plan.forward(q[:2], *keys)
    with pytest.raises(fulmen.ArgumentError, match="workspace is not a vector of bytes"):
        plan.forward(q, *keys, workspace=torch.empty(9, 9))
    assert not any(ways)
    with torch.no_grad():
        fulmen.attention(q, *keys, sinks=sinks)
    assert ways[-1]


def test_autograd_is_told_of_what_was_written(ways: list[bool]) -> None:
    q, k, v, table, lengths = problem()
    out = torch.zeros_like(q)
    scale = torch.ones((), requires_grad=True)
    product = out * scale  # keeps out for its backward pass
    fulmen.attention_paged(q, k, v, table, lengths, out=out)
    assert ways == [True]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_negative_view_is_read_by_value(ways: list[bool]) -> None:
    q, k, v, table, lengths = problem()
    found = fulmen.attention_paged(torch._neg_view(q), k, v, table, lengths)
    same(found, fulmen.attention_paged(-q, k, v, table, lengths))
    assert all(ways)


def test_a_list_names_inputs_behind_v_alone() -> None:
    q, k, v, table, _ = problem()
    for which in (0, 1, 255):
        with pytest.raises(RuntimeError, match="no input behind v"):
            torch.ops.fulmen.kept(q, k, v, [table], which, 2, 1, None)


def test_texts_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    q, slope = torch.randn(2, 4, 9, 8), torch.rand(4)
    taken = []
    kept = fast_path._kept

    def counted(*args: Any) -> Any:
        taken.append(args)
        return kept(*args)

    score = fulmen.score("s - slope[h] * abs(p - j)", slope=slope)
    options: list[dict[str, Any]] = [
        {"score": score},
        {"score": score, "mask": "j <= p", "return_lse": True},
        {"mask": fulmen.masks.expression("slope[h] > 0.5 or j <= p", slope=slope)},
    ]
    wanted = [fulmen.attention(q.requires_grad_(), q, q, **x) for x in options]
    monkeypatch.setattr(fast_path, "_kept", counted)
    with torch.no_grad():
        for given, slow in zip(options, wanted):
            torch.testing.assert_close(fulmen.attention(q, q, q, **given), slow)
    assert len(taken) == 3
    with torch.no_grad():  # a number would keep options for each of its values
        numbered = fulmen.score("s * $heat", heat=0.5)
        fulmen.attention(q, q, q, score=numbered)
        with pytest.raises(fulmen.Error, match="score ends"):
            fulmen.attention(q, q, q, score="s +")
    assert len(taken) == 3
