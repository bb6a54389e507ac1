# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""First and second derivatives of the calls, reverse and forward mode, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_run import IS_FULL
from reference import inputs, reference
from torch import autograd

import fulmen


def gradcheck(*args: Any, **checks: bool) -> bool:
    """torch's, along random directions; FULMEN_TEST_FULL=1: entry by entry."""
    return autograd.gradcheck(*args, fast_mode=not IS_FULL, **checks)


def gradgradcheck(*args: Any, **checks: bool) -> bool:
    return autograd.gradgradcheck(*args, fast_mode=not IS_FULL, **checks)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


OPTIONS = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": (2, 1)},
    "top_left": lambda: {"causal": True, "alignment": "top_left"},
    "chunks": lambda: {"mask": fulmen.masks.chunks(3)},
    "prefix": lambda: {"causal": True, "mask": fulmen.masks.prefix(4)},
    "softcap": lambda: {"softcap": 1.5},
    "scale": lambda: {"scale": -0.3},
    "bias": lambda: {"bias": tensor(1, 4, 7, 9)},
    "bias over rows": lambda: {"bias": tensor(9)},
    "sinks": lambda: {"sinks": tensor(4), "causal": True},
    "mask": lambda: {"mask": torch.rand(2, 1, 7, 9) > 0.4},
    "slopes": lambda: {"alibi_slopes": torch.rand(4, dtype=torch.float64)},
    "lengths": lambda: {"kv_lengths": torch.tensor([9, 4]), "q_lengths": torch.tensor([3, 7])},
}


def differentiable(options: dict) -> list[torch.Tensor]:
    return [options[name] for name in ("bias", "sinks") if name in options]


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_agree_with_plain_torch(name: str) -> None:
    options = OPTIONS[name]()
    leaves = inputs() + differentiable(options)
    o, lse = fulmen.attention(*leaves[:3], return_lse=True, **options)
    expected_o, expected_lse = reference(*leaves[:3], **options)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(lse, expected_lse)
    do = torch.randn_like(o)
    dlse = torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0), expected_lse.masked_fill(lse == -torch.inf, 0)
    found = torch.autograd.grad((o, finite[0]), leaves, (do, dlse))
    expected = torch.autograd.grad((expected_o, finite[1]), leaves, (do, dlse))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_in_both_modes_and_twice(name: str) -> None:
    options = OPTIONS[name]()
    options = {
        key: x.narrow(-1, 0, 5).narrow(-2, 0, 3).contiguous().detach()
        if isinstance(x, torch.Tensor) and x.dim() >= 2
        else x
        for key, x in options.items()
    }
    if "q_lengths" in options:
        options = {"kv_lengths": torch.tensor([5, 2]), "q_lengths": torch.tensor([1, 3])}
    if options.get("bias") is not None:
        options["bias"] = tensor(*((1, 2, 3, 5) if options["bias"].dim() > 1 else (5,)))
    for vector in ("sinks", "alibi_slopes"):
        if vector in options:
            options[vector] = options[vector].detach()[:2].clone()
    options.get("sinks", torch.empty(0)).requires_grad_()
    extra = [key for key in ("bias", "sinks") if key in options]

    def call(q, k, v, *more):
        o, lse = fulmen.attention(q, k, v, return_lse=True, **{**options, **dict(zip(extra, more))})
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    leaves = inputs(2, 2, 1, 3, 5, 4, 3) + [options[key] for key in extra]
    assert gradcheck(
        call,
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert gradgradcheck(call, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "hsd", "shd", "sd"])
def test_layouts_differentiate_in_both_modes_and_twice(layout: str) -> None:
    q, k, v = inputs(2, 2, 2, 3, 4, 4, 3)
    shaped = []
    to_layout = {
        "bhsd": lambda x: x,
        "bshd": lambda x: x.transpose(1, 2),
        "hsd": lambda x: x[0],
        "shd": lambda x: x[0].transpose(0, 1),
        "sd": lambda x: x[0, 0],
    }[layout]
    for x in (q, k, v):
        shaped.append(to_layout(x.detach()).clone().requires_grad_())

    def call(*xs):
        return fulmen.attention(*xs, layout=layout, causal=True, return_lse=True)

    assert gradcheck(call, shaped, check_forward_ad=True)
    assert gradgradcheck(call, shaped, check_fwd_over_rev=True)


def test_packed_sequences_differentiate_in_both_modes_and_twice() -> None:
    cu_q, cu_kv = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 8])
    leaves = [
        tensor(6, 2, 4),
        tensor(8, 1, 4),
        tensor(8, 1, 3),
    ]  # the last row of q belongs to no sequence

    def call(*xs):
        o, lse = fulmen.attention_varlen(*xs, cu_q, cu_kv, causal=True, return_lse=True)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert gradcheck(call, leaves, check_forward_ad=True)
    assert gradgradcheck(call, leaves, check_fwd_over_rev=True)


def test_dropout_differentiates_in_both_modes_and_twice_with_the_same_lots() -> None:
    def call(*xs):
        return fulmen.attention(*xs, dropout_p=0.4, rng=(2**63 + 5, 7))

    leaves = inputs(2, 2, 1, 3, 11, 4, 3)
    assert gradcheck(call, leaves, check_forward_ad=True)
    assert gradgradcheck(call, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_each_gradient_alone(name: str) -> None:
    every = dict(zip("qkv", inputs(grad=False)))
    every["bias"] = torch.randn(4, 7, 9, dtype=torch.float64)
    every["sinks"] = torch.randn(4, dtype=torch.float64)
    every[name].requires_grad_()
    o = fulmen.attention(**every)
    o.square().sum().backward()
    expected = torch.autograd.grad(reference(**every)[0].square().sum(), every[name])[0]
    torch.testing.assert_close(every[name].grad, expected)
    assert all(x.grad is None for key, x in every.items() if key != name)


def test_through_lse_alone() -> None:
    q, k, v = inputs()
    _, lse = fulmen.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    expected = torch.autograd.grad(reference(q, k, v)[1].sum(), (q, k))
    torch.testing.assert_close(found, expected)


def test_merge_of_parts_with_sinks() -> None:
    q, k, v = inputs(2, 4, 4)
    sinks = tensor(4)

    def merged(q, k, v, sinks):
        parts = [
            fulmen.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True)
            for a, b in ((0, 4), (4, 9), (9, 9))
        ]
        o, lse = fulmen.merge(parts, sinks=sinks)
        return o, lse

    def whole(q, k, v, sinks):
        return fulmen.attention(q, k, v, sinks=sinks, return_lse=True)

    torch.testing.assert_close(merged(q, k, v, sinks), whole(q, k, v, sinks))
    do, dlse = torch.randn(2, 4, 7, 8, dtype=torch.float64), torch.randn(2, 4, 7).double()
    leaves = (q, k, v, sinks)
    found = torch.autograd.grad(merged(*leaves), leaves, (do, dlse))
    torch.testing.assert_close(found, torch.autograd.grad(whole(*leaves), leaves, (do, dlse)))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sd"])
def test_merge_gradcheck(layout: str) -> None:
    shapes = {
        "bhsd": ((1, 2, 3, 4), (1, 2, 3)),
        "bshd": ((1, 3, 2, 4), (1, 2, 3)),
        "sd": ((3, 4), (3,)),
    }[layout]
    parts = [tensor(*shape) for shape in (*shapes, *shapes)]
    sinks = tensor(1 if layout == "sd" else 2)

    def call(o1, lse1, o2, lse2, sinks):
        return fulmen.merge([(o1, lse1), (o2, lse2)], sinks=sinks, layout=layout)

    assert gradcheck(call, [*parts, sinks])
    assert gradgradcheck(call, [*parts, sinks])


def test_forward_mode_takes_linear_memory() -> None:
    from fulmen._torch import derivatives as rows

    q, k, v = inputs(1, 1, 1, 300, 300, 4, 4, grad=False)
    sizes = []
    original = rows.attention_rows

    def spied(leaves, block, *rest):
        sizes.append(block.shape[-2] * k.shape[-2])
        return original(leaves, block, *rest)

    block_elems, rows.BLOCK_ELEMS, rows.attention_rows = rows.BLOCK_ELEMS, 6000, spied
    try:
        _, found = torch.func.jvp(lambda q: fulmen.attention(q, k, v), (q,), (q,))
    finally:
        rows.BLOCK_ELEMS, rows.attention_rows = block_elems, original
    assert max(sizes) <= 6000
    _, expected = torch.func.jvp(lambda q: reference(q, k, v)[0], (q,), (q,))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", [1, 2])
def test_what_an_empty_part_holds_has_no_gradient(order: int) -> None:
    """A slot that nobody wrote: lse = -inf in some rows, and NaN in o there."""
    o = [torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lse = [torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(2)]
    lse[1][:, :, 2:] = -torch.inf
    lse[1][0, 1] = -torch.inf
    lse = [x.requires_grad_() for x in lse]
    empty = lse[1] == -torch.inf
    poisoned = o[1].detach().masked_fill(empty[..., None], torch.nan).requires_grad_()
    found = []
    for part in (o[1], poisoned):
        leaves = [o[0], lse[0], part, lse[1]]
        merged = fulmen.merge([(o[0], lse[0]), (part, lse[1])])
        loss = (merged[0].sin().sum() + merged[1].cos().sum()).double()
        gradients = torch.autograd.grad(loss, leaves, create_graph=order == 2)
        if order == 2:
            gradients = torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)
        assert gradients[2][empty].eq(0).all()
        assert gradients[3][empty].eq(0).all()
        found.append(gradients)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
