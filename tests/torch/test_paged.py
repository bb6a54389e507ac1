# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.attention_paged on tensors: eager, compiled, in CUDA graphs; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_run import full

import fulmen
from fulmen._torch import ops
from fulmen._torch.ops import Arrays

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PAGE, DIM = 4, 16


def problem(rows: int = 2, dtype: Any = torch.float32) -> tuple[Any, ...]:
    """q (3, head, row, dim), pools (page, kv_head, row, dim), table, lengths."""
    q = torch.randn(3, 4, rows, DIM, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, 12, 2, PAGE, DIM, device=DEVICE, dtype=dtype)
    table = torch.tensor([[7, 2, 11], [4, -1, 99], [0, 3, 99]], dtype=torch.int32, device=DEVICE)
    return q, k, v, table, torch.tensor([11, 0, 5], dtype=torch.int32, device=DEVICE)


def gathered(q: Any, k: Any, v: Any, table: Any, lengths: Any, **options: Any) -> Any:
    """The same from contiguous keys."""
    rows = table.long().clamp(0, len(k) - 1)
    k, v = (x[rows].transpose(1, 2).flatten(2, 3) for x in (k, v))
    return fulmen.attention(q, k, v, kv_lengths=lengths, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_pages_give_what_contiguous_keys_give(dtype: Any, causal: bool) -> None:
    given = problem(dtype=dtype)
    o, lse = fulmen.attention_paged(*given, causal=causal, return_lse=True)
    assert (o.dtype, o.device, lse.dtype) == (dtype, given[0].device, torch.float32)
    wanted, wanted_lse = gathered(*given, causal=causal, return_lse=True)
    close = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(o, wanted, atol=close, rtol=close)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)
    out = torch.empty_like(o)
    assert fulmen.attention_paged(*given, causal=causal, out=out) is out
    assert torch.equal(out, o)


def test_packed_queries_indices_padding_and_lists() -> None:
    q, k, v, table, lengths = problem()
    rows = q.transpose(1, 2).flatten(0, 1)
    pages = k.transpose(1, 2), v.transpose(1, 2)
    cu_q = torch.arange(4, device=DEVICE) * 2
    packed = fulmen.attention_paged(rows, *pages, table, lengths, cu_q=cu_q, causal=True)
    wanted = gathered(q, k, v, table, lengths, causal=True).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(packed, wanted)
    csr = torch.tensor([0, 3, 3, 5]), torch.tensor([7, 2, 11, 0, 3])
    csr = tuple(x.to(DEVICE) for x in csr)
    found = fulmen.attention_paged(
        rows, *pages, csr, lengths, cu_q=cu_q, causal=True, max_kv=12, layout="shd"
    )
    torch.testing.assert_close(found, wanted)
    index = torch.tensor([5, 0, 9], device=DEVICE)
    found = fulmen.attention_paged(q, k, v, None, [4, 2, 3], batch_index=index, kv_start=[1, 0, 0])
    wanted = fulmen.attention(q, k[index], v[index], kv_lengths=[4, 2, 3], kv_start=[1, 0, 0])
    torch.testing.assert_close(found, wanted)


def test_keys_that_requests_share() -> None:
    q, k, v, table, lengths = problem()
    said = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    call = torch.compile(fulmen.attention_paged, fullgraph=True, backend="aot_eager")
    wanted = fulmen.attention_paged(q, k, v, table, lengths, causal=True)
    for attend in (fulmen.attention_paged, call):
        found = attend(q, k, v, table, lengths, causal=True, kv_shared=said)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_what_requires_grad_is_refused_by_name(name: str) -> None:
    q, k, v, table, lengths = problem()
    given = {"q": q, "k": k, "v": v, "sinks": torch.zeros(4, device=DEVICE)}
    given[name] = given[name].requires_grad_()
    sinks = given["sinks"]
    call = (given["q"], given["k"], given["v"], table, lengths)
    with pytest.raises(fulmen.UnsupportedError, match=f"{name} requires grad and page_table"):
        fulmen.attention_paged(*call, sinks=sinks)
    with torch.no_grad():
        fulmen.attention_paged(*call, sinks=sinks)


def test_arrays_of_caches_alone_have_no_gradient_either() -> None:
    q = torch.randn(1, 2, 3, 8, device=DEVICE, requires_grad=True)
    tree = fulmen.masks.tree(torch.zeros(3, dtype=torch.int64, device=DEVICE))
    for said, options in (
        ("kv_start", {"kv_start": [1]}),
        ("positions", {"positions": [[0, 1, 2]]}),
        ("tree", {"mask": tree}),
    ):
        with pytest.raises(fulmen.UnsupportedError, match=f"q requires grad and {said}"):
            fulmen.attention(q, q.detach(), q.detach(), **options)


def test_transforms_of_functions_are_refused() -> None:
    q, k, v, table, lengths = problem()

    def summed(x: Any) -> Any:
        return fulmen.attention_paged(x, k, v, table, lengths).sum()

    with pytest.raises(fulmen.UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(summed)(q[None])
    with pytest.raises(fulmen.UnsupportedError):
        torch.func.grad(summed)(q)


def test_opcheck() -> None:
    q, k, v, table, lengths = problem()
    tree = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    settings = ops.op_settings(fulmen.options.settings_of((("causal", True),)))
    arrays = Arrays(q, k, v, page_table=table, kv_lengths=lengths, tree=tree)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attention, (*arrays, *settings, 2), test_utils=checks)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=full)])
def test_one_graph_for_all_lengths(backend: str) -> None:
    """Without a break, and lengths, tables and words are read in the run."""

    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, tree: Any) -> Any:
        mask = fulmen.masks.tree(tree)
        return fulmen.attention_paged(q, k, v, table, lengths, causal=True, mask=mask)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q, k, v, table, lengths = problem()
    tree = torch.tensor([[1, 3]] * 3, device=DEVICE)
    for given in (lengths, lengths.flip(0) % 5):
        found = compiled(q, k, v, table, given, tree)
        torch.testing.assert_close(found, attend(q, k, v, table, given, tree))
    packed = torch.compile(
        lambda *x, cu_q: fulmen.attention_paged(*x, cu_q=cu_q), fullgraph=True, backend=backend
    )
    rows = q.transpose(1, 2).flatten(0, 1)
    given = (rows, k.transpose(1, 2), v.transpose(1, 2), table, lengths)
    cu_q = torch.tensor([0, 1, 4, 6], device=DEVICE)
    torch.testing.assert_close(packed(*given, cu_q=cu_q), fulmen.attention_paged(*given, cu_q=cu_q))


@pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU")
def test_a_cuda_graph_serves_other_lengths_and_pages() -> None:
    """Captured once with short requests; replayed as they grow, move, end and begin."""
    q, k, v, table, lengths = problem(rows=1, dtype=torch.bfloat16)
    fulmen.attention_paged(q, k, v, table, lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = fulmen.attention_paged(q, k, v, table, lengths, return_lse=True)
    for step in range(40):
        q.normal_()
        table.copy_(torch.randint(0, len(k), table.shape, device=DEVICE))
        lengths.copy_(torch.randint(0, 3 * PAGE + 1, lengths.shape, device=DEVICE) * (step % 3 > 0))
        graph.replay()
        wanted, wanted_lse = fulmen.attention_paged(q, k, v, table, lengths, return_lse=True)
        assert torch.equal(o, wanted)
        assert torch.equal(lse, wanted_lse)
