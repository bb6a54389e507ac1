# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The library's kernels of the operators do what those in Python do, which older PyTorch takes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference import inputs, op_settings

import fulmen
from fulmen._torch import ops
from fulmen._torch.ops import Arrays, like, o_like
from fulmen.options import names_of, settings_of

pytestmark = pytest.mark.skipif(
    not ops.has_kernels(), reason="this PyTorch is older than 2.10: it takes no kernels"
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale and softcap": ({}, {"scale": 0.3, "softcap": 2.0}),
    "window": ({}, {"window_left": 2, "window_right": 1, "alignment": "top_left"}),
    "prefix": ({}, {"causal": True, "prefix": 2}),
    "chunk": ({}, {"chunk": 3}),
    "out_dtype": ({}, {"out_dtype": torch.float32}),
    "bias and sinks": ({"bias": torch.randn(1, 4, 7, 9), "sinks": torch.randn(4)}, {}),
    "mask": ({"mask": torch.rand(7, 9) < 0.7}, {}),
    "slopes": ({"alibi_slopes": torch.rand(4)}, {"deterministic": True, "batch_invariant": True}),
    "lengths": ({"q_lengths": torch.tensor([7, 3]), "kv_lengths": torch.tensor([9, 0])}, {}),
    "ids": ({"q_ids": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])}, {}),
    "dropout": ({"rng": torch.tensor([-5, 7])}, {"dropout_p": 0.4}),
    "scalar": ({}, {"implementation": "scalar", "backend": "cpu"}),
}


def same(found: Any, expected: Any) -> None:
    assert [x is None for x in found] == [x is None for x in expected]
    for x, y in zip(found, expected):
        if x is not None:
            assert (x.dtype, x.stride()) == (y.dtype, y.stride())
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_both_kernels_give_the_same(name: str, dtype: Any) -> None:
    arrays, settings = CASES[name]
    if dtype is torch.float64 and "out_dtype" in settings:
        settings = {}
    q, k, v = inputs(q_rows=9 if name == "ids" else 7, dtype=dtype, grad=False)
    arrays = {key: x.to(dtype) if key in ("bias", "sinks") else x for key, x in arrays.items()}
    args = (*Arrays(q, k, v, **arrays), *op_settings(**settings))
    for outputs in (1, 2, 3, 4):
        expected = ops._attention_kernel(*args, outputs)
        same(ops.attention_kernel(*args, outputs), expected)
    o, _, stats = expected
    need = [True, False, True, True, True, *[False] * (len(ops.DIFFERENTIABLE) - 5)]
    lse = torch.randn(o.shape[:-1], dtype=stats.dtype)
    for do, dlse in ((torch.randn_like(o), None), (None, lse), (torch.randn_like(o), lse)):
        given = (do, dlse, o, stats, *args)
        wanted = [*need[:3], "bias" in arrays, "sinks" in arrays, *need[5:]]
        expected = ops._attention_backward_kernel(*given, wanted)
        same(ops.attention_backward_kernel(*given, need), expected)


def test_packed_rows_first_and_lse_of_a_caller() -> None:
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 4, 9])
    args = (*Arrays(q, k, v, cu_q=offsets, cu_kv=offsets), *op_settings(layout="shd", causal=True))
    expected = ops._attention_kernel(*args, 3)
    same(ops.attention_kernel(*args, 3), expected)
    o, lse, _ = expected
    given = (
        torch.randn_like(o),
        None,
        o,
        lse,
        *args,
        [x < 3 for x in range(len(ops.DIFFERENTIABLE))],
    )
    same(ops.attention_backward_kernel(*given), ops._attention_backward_kernel(*given))


def strided(rows: list[int], dim: int, order: list[int], step: int, choose: Any) -> Any:
    """(*rows, dim) in memory in some order of axes, with gaps."""
    memory = torch.randn(*(rows[axis] + choose.randrange(2) for axis in order), step * dim)
    x = memory.permute(*(order.index(axis) for axis in range(3)), 3)
    return x[: rows[0], : rows[1], : rows[2], ::step]


def lies_like(found: Any, expected: Any) -> bool:
    """Where an axis has one place, its stride says nothing."""
    pairs = zip(found.shape, found.stride(), expected.stride())
    return found.shape == expected.shape and all(n < 2 or a == b for n, a, b in pairs)


def test_results_lie_as_torch_lays_them() -> None:
    """The fake kernels say so to the compiler, which counts on it."""
    choose = random.Random(0)
    for _ in range(200):
        rows = [choose.choice((1, 2, 3)) for _ in range(3)]
        order, step = choose.sample(range(3), 3), choose.choice((1, 1, 1, 2))
        q, k, v = (strided(rows, dim, order, step, choose) for dim in (8, 8, choose.choice((8, 4))))
        if choose.randrange(4) == 0:
            k = k[:, :1].expand_as(k)
        args = (*Arrays(q, k, v), *op_settings())
        o, _, stats = ops.attention_kernel(*args, 4)
        assert lies_like(o, o_like(q, v, None))
        need = [True] * 3 + [False] * 2
        found = ops.attention_backward_kernel(o, None, o, stats, *args, need)
        assert all(lies_like(x, like(owner)) for x, owner in zip(found, (q, k, v)))


@pytest.mark.parametrize("option", ["alignment", "backend", "implementation", "precision"])
def test_both_refuse_a_number_that_names_nothing(option: str) -> None:
    settings = settings_of().replaced(**{option: 99})
    args = (*Arrays(*inputs(dtype=torch.float32, grad=False)), *ops.op_settings(settings), 1)
    with pytest.raises(RuntimeError, match=option):
        ops.attention_kernel(*args)
    with pytest.raises(fulmen.Error, match=option):
        ops._attention_kernel(*args)


def test_names_are_those_of_the_library() -> None:
    q, k, v = inputs(dtype=torch.float32, grad=False)
    for option in ("alignment", "backend", "implementation", "precision"):
        names = ", ".join(map(repr, names_of(option)))
        with pytest.raises(
            fulmen.ArgumentError, match=f"{option} is 'middle'; allowed are {names}$"
        ):
            fulmen.attention(q, k, v, **{option: "middle"})


def test_what_a_kernel_refuses() -> None:
    q, k, v = inputs(dtype=torch.float32, grad=False)
    for arrays, settings, words in (
        (Arrays(q, k[0], v), {}, "k has 3 axes; the layout of the call names 4"),
        (Arrays(q, k, v), {"dropout_p": 0.5}, "rng is missing"),
        (Arrays(q, k, v, rng=torch.tensor([1])), {"dropout_p": 0.5}, r"rng is not int64\[2\]"),
        (Arrays(q, k, v, mask=torch.ones(7, 9, dtype=torch.int8)), {}, "bool"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.attention_kernel(*arrays, *op_settings(**settings), 1)
        with pytest.raises(fulmen.Error, match=words):
            ops.attention(*arrays, *op_settings(**settings), 1)
