# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.distributed under torch.compile: one graph, with the results of an eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_context_parallel import LENGTH, differentiable, masks, tensors

import fulmen
from fulmen import distributed as fd
from fulmen.distributed import traced

COMPILED = ["window", "documents and chunks", "sinks", "texts"]


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_function_has_one_graph(name: str) -> None:
    whole = [x.requires_grad_() for x in tensors(LENGTH)[:3]]
    cp = fd.in_process(1, lambda transport: fd.context_parallel(transport, length=LENGTH))[0]
    options, leaves = differentiable(masks()[name])
    leaves = [*whole, *leaves]

    def layer(q: Any, k: Any, v: Any) -> Any:
        o, lse = cp.attention(q * 1.5, k, v, return_lse=True, **options)
        return o.sin().sum() + lse.cos().sum()

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*whole), layer(*whole)
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(x, leaves) for x in (found, expected))):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_operator_of_a_graph_gives_what_a_call_gives(heads: int, layout: str) -> None:
    whole = tensors(LENGTH)[:3]
    table = torch.rand(4, dtype=torch.float64, requires_grad=True)
    options = {"score": fulmen.score("s + table[h] * (p - j)", table=table), "causal": True}

    def rank(transport: Any) -> bool:
        cp = fd.context_parallel(transport, length=LENGTH, schedule="ring", heads=heads)
        mine = [cp.shard(x, 2) for x in whole]
        if layout == "bshd":
            mine = [x.transpose(1, 2) for x in mine]
        mine = [x.detach().requires_grad_() for x in mine]
        both = []
        plain = cp.attention(*mine, layout=layout, return_lse=True, **options)
        for o, lse in (traced.attention(cp, *mine, layout, options), plain):
            loss = o.sin().sum() + lse.cos().sum()
            both.append([o, lse, *torch.autograd.grad(loss, [*mine, table])])
        return all(torch.equal(x, y) for x, y in zip(*both))

    assert all(fd.in_process(2, rank))


def test_a_graph_whose_object_is_gone_says_so() -> None:
    q, k, v = tensors(LENGTH)[:3]
    number = traced.numbered(fd.in_process(1, fd.context_parallel)[0])
    with pytest.raises(fulmen.ArgumentError, match="is gone; keep it"):
        torch.ops.fulmen.context_parallel(q, k, v, [], number, traced._number_of(("bhsd", ())))
