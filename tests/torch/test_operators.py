# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators under torch's own checks, the compiler, export, transforms and checkpointing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from long_run import full
from reference import inputs, op_settings, reference
from torch.utils import checkpoint

import fulmen
from fulmen._library import schema
from fulmen._torch import fast_path, ops
from fulmen._torch.ops import Arrays

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=full)]


def packed_inputs() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    leaves = [torch.randn(n, h, 8, requires_grad=True) for n, h in ((9, 4), (11, 2), (11, 2))]
    return leaves, torch.tensor([0, 2, 2, 9]), torch.tensor([0, 4, 5, 11])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "bias": ({"bias": torch.randn(1, 4, 7, 9, requires_grad=True)}, {}),
    "mask": ({"mask": torch.rand(7, 9) > 0.3}, {}),
    "slopes": ({"alibi_slopes": torch.rand(4)}, {}),
    "sinks": ({"sinks": torch.randn(4, requires_grad=True)}, {}),
    "lengths": (
        {"q_lengths": torch.tensor([3, 7]), "kv_lengths": torch.tensor([0, 9])},
        {"causal": True},
    ),
    "ids": ({"q_ids": torch.arange(7) // 3, "kv_ids": torch.arange(9) // 3}, {}),
    "dropout": ({"rng": torch.tensor([3, 4])}, {"dropout_p": 0.3}),
    "numbers": ({}, {"scale": 0.2, "softcap": 2.0, "window_left": 3, "chunk": 4}),
    "float32 out": ({}, {"out_dtype": torch.float32}),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    arrays, settings = CASES[name]
    q, k, v = inputs(dtype=torch.float32)
    args = (*Arrays(q, k, v, **arrays), *op_settings(**settings))
    for outputs in (1, 3):
        torch.library.opcheck(ops.attention, (*args, outputs))
    with torch.no_grad():
        o, _, stats = ops.attention(*args, 3)
    need = [name in ("q", "k", "v", *arrays) for name in schema().differentiable_inputs]
    given = (torch.randn_like(o), None, o, stats, *args, need)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operator in (ops.attention_backward, ops.attention_batched_backward):
        torch.library.opcheck(operator, given, test_utils=checks)


def test_opcheck_of_packed_out_and_merge() -> None:
    (q, k, v), cu_q, cu_kv = packed_inputs()
    args = (*Arrays(q, k, v, cu_q=cu_q, cu_kv=cu_kv), *op_settings(layout="shd"))
    torch.library.opcheck(ops.attention, (*args, 3))
    q, k, v = inputs(dtype=torch.float32, grad=False)
    args = (*Arrays(q, k, v), *op_settings())
    given = {"out": torch.empty(2, 4, 7, 8), "lse": torch.empty(2, 4, 7)}
    torch.library.opcheck(ops.attention_out, args, given)
    os = [torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 4, 7, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(ops.merge, (os, lses, torch.randn(4), "bhsd", None))


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """The layer is imported while it is traced: no guard may ask whether it was there before."""
    program = """
import torch, fulmen
attend = torch.compile(lambda x: fulmen.attention(x, x, x), fullgraph=True, backend="eager")
x = torch.ones(1, 1, 2, 4)
assert torch.equal(attend(x), x) and torch.equal(attend(x), x)
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 5}, {"softcap": 3.0}])
def test_compiled_whole_and_equal(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()  # each case is another program of one function

    @torch.compile(fullgraph=True, backend=backend)
    def step(q, k, v):
        o, lse = fulmen.attention(q * 1.5, k, v, return_lse=True, **options)
        return o.sin().sum() + lse.sum()

    leaves = inputs(dtype=torch.float32)
    found = torch.autograd.grad(step(*leaves), leaves)
    o, lse = fulmen.attention(leaves[0] * 1.5, *leaves[1:], return_lse=True, **options)
    expected = torch.autograd.grad(o.sin().sum() + lse.sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_two_graphs_serve_every_length() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda q, k, v: fulmen.attention(q, k, v, causal=True).sum(),
        fullgraph=True, backend=counter,
    )  # fmt: skip
    for rows in (5, 6, 17, 33, 64):
        leaves = inputs(q_rows=rows, kv_rows=rows, dtype=torch.float32)
        found = torch.autograd.grad(step(*leaves), leaves)
        expected = torch.autograd.grad(fulmen.attention(*leaves, causal=True).sum(), leaves)
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 2


def test_packed_lengths_do_not_recompile() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, cu_q, cu_kv, longest):
        return fulmen.attention_varlen(q, k, v, cu_q, cu_kv, max_q=longest, causal=True)

    leaves, cu_q, cu_kv = packed_inputs()
    for middle, longest in ((2, 7), (3, 6), (4, 5), (6, 6)):
        cu_q = torch.tensor([0, middle, middle, 9])
        found = step(*leaves, cu_q, cu_kv, longest)
        torch.testing.assert_close(
            found, fulmen.attention_varlen(*leaves, cu_q, cu_kv, causal=True)
        )
    assert counter.frame_count <= 2


def test_compiled_masks_lists_merge_and_out() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, out):
        parts = [
            fulmen.attention(q, k, v, mask=fulmen.masks.documents(ids), return_lse=True),
            fulmen.attention(q, k, v, mask=fulmen.masks.chunks(4), return_lse=True),
        ]
        fulmen.attention(q, k, v, mask=(fulmen.masks.prefix(2), ids > 0), causal=True, out=out)
        return fulmen.merge(parts)

    q, k, v = inputs(kv_rows=7, dtype=torch.float32, grad=False)
    out = torch.empty_like(q)
    o, _ = step(q, k, v, out)
    assert torch.isfinite(o).all()
    expected = fulmen.attention(q, k, v, mask=(fulmen.masks.prefix(2), ids > 0), causal=True)
    torch.testing.assert_close(out, expected)


def test_exported_with_a_dynamic_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fulmen.attention(q, k, v, causal=True)

    rows = torch.export.Dim("rows", min=2, max=4096)
    leaves = inputs(kv_rows=7, dtype=torch.float32, grad=False)
    exported = torch.export.export(Model(), tuple(leaves), dynamic_shapes=[{2: rows}] * 3)
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.fulmen.attention.default) == 1
    longer = inputs(q_rows=20, kv_rows=20, dtype=torch.float32, grad=False)
    torch.testing.assert_close(exported.module()(*longer), fulmen.attention(*longer, causal=True))


def test_function_transforms_agree_with_plain_torch() -> None:
    q, k, v = inputs(1, 2, 1, 3, 4, 4, 3, grad=False)

    def ours(q, k, v):
        return fulmen.attention(q, k, v, causal=True).square().sum()

    def plain(q, k, v):
        return reference(q, k, v, causal=True)[0].square().sum()

    func = torch.func
    for transform in (
        lambda f: func.grad(f, argnums=(0, 1, 2)),
        lambda f: func.jacrev(f, argnums=1),
        lambda f: func.jacfwd(f, argnums=2),
        func.hessian,
        lambda f: lambda *x: func.jvp(f, x, x)[1],
        lambda f: func.grad(lambda *x: func.grad(f)(*x).sum(), argnums=2),
    ):
        torch.testing.assert_close(transform(ours)(q, k, v), transform(plain)(q, k, v))


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, None), (None, 2, 2), (None, None, 0)])
def test_vmap_of_the_call_and_of_its_gradient(dims: tuple[Any, ...]) -> None:
    leaves = []
    for x, dim in zip(inputs(grad=False), dims):
        leaves.append(x if dim is None else torch.stack([x, -x, 2 * x], dim))
    mask, bias = torch.rand(3, 2, 1, 7, 9) > 0.3, torch.randn(4, 7, 9).double()

    def call(q, k, v, mask):
        return fulmen.attention(q, k, v, mask=mask, bias=bias, return_lse=True)

    def loss(q, k, v, mask):
        return fulmen.attention(q, k, v, mask=mask, bias=bias).square().sum()

    def select(index):
        return [x if dim is None else x.select(dim, index) for x, dim in zip(leaves, dims)]

    for function in (call, torch.func.grad(loss, argnums=(0, 1, 2))):
        found = torch.vmap(function, in_dims=(*dims, 0))(*leaves, mask)
        every = [function(*select(index), mask[index]) for index in range(3)]
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*every))))


def test_vmap_one_by_one_where_the_batch_cannot_hold_it() -> None:
    (q, k, v), cu_q, cu_kv = packed_inputs()
    q, k, v = q.detach(), k.detach(), v.detach()
    many = torch.stack([q, q.flip(0)])
    found = torch.vmap(lambda q: fulmen.attention_varlen(q, k, v, cu_q, cu_kv))(many)
    expected = [fulmen.attention_varlen(x, k, v, cu_q, cu_kv) for x in many]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.skipif(not ops.has_kernels(), reason="this PyTorch is older than 2.10")
def test_opcheck_of_the_operators_behind_the_fast_path() -> None:
    q, k, v = inputs(grad=False)
    way = fast_path.way_of((False, ()))
    assert way is not None
    assert way.is_plain
    number = way.number
    torch.library.opcheck(torch.ops.fulmen.plain.default, (q, k, v, number))
    made = fulmen.attention_forward(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    args = (torch.randn_like(q), *leaves, made.o, made.stats, number, 7)
    checks = ("test_schema", "test_faketensor")  # derivatives: test_gradients
    torch.library.opcheck(torch.ops.fulmen.plain_derivable.default, args, test_utils=checks)
    constants = [x.detach() if torch.is_tensor(x) else x for x in args]
    for need in (7, 2):
        checked = (*constants[:-1], need)
        torch.library.opcheck(torch.ops.fulmen.plain_backward.default, checked)


def test_a_mode_that_watches_the_backward_pass_alone_sees_it() -> None:
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    leaves = inputs()
    o = fulmen.attention(*leaves)
    expected = torch.autograd.grad(o, leaves, torch.ones_like(o), retain_graph=True)
    with Mode():
        found = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert all(map(torch.equal, found, expected))
    assert any(name.startswith("fulmen::") for name in seen)


def test_a_checkpoint_may_end_with_attention() -> None:
    """It leaves the repeated call by an exception as soon as the last tensor is kept."""
    leaves = inputs(dtype=torch.float32)
    do = torch.randn_like(leaves[0])
    o = checkpoint.checkpoint(fulmen.attention, *leaves, use_reentrant=False)
    expected = torch.autograd.grad(fulmen.attention(*leaves), leaves, do)
    assert all(map(torch.equal, torch.autograd.grad(o, leaves, do), expected))


def test_checkpoint_policy_keeps_the_output() -> None:
    runs = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.attention_kernel:
                runs.append(func)
            return func(*args, **(kwargs or {}))

    def policy(context, op, *args, **kwargs):
        keep = op is torch.ops.fulmen.attention_kernel.default
        choice = checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if keep else choice.PREFER_RECOMPUTE

    def context():
        return checkpoint.create_selective_checkpoint_contexts(policy)

    def step(q, k, v):
        return fulmen.attention(q.sin(), k, v)

    leaves = inputs()
    expected = torch.autograd.grad(step(*leaves).square().sum(), leaves)
    for keyword, forwards in (({"context_fn": context}, 1), ({}, 2)):
        runs.clear()
        with Counting():
            o = checkpoint.checkpoint(step, *leaves, use_reentrant=False, **keyword)
            found = torch.autograd.grad(o.square().sum(), leaves)
        torch.testing.assert_close(found, expected)
        assert len(runs) == forwards


def test_the_profiler_and_flop_counters_see_the_operator() -> None:
    q, k, v = inputs(grad=False)
    with torch.profiler.profile() as profile:
        fulmen.attention(q, k, v)
    assert any(event.key == "fulmen::attention" for event in profile.key_averages())


def test_saved_tensors_hooks_and_in_place_changes() -> None:
    q, k, v = inputs()
    packed: list[torch.Tensor] = []

    def pack(x):
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = fulmen.attention(q, k, v)
    o.sum().backward()
    assert any(x.data_ptr() == o.data_ptr() for x in packed)
    k2 = k.detach().clone().requires_grad_()
    changed = k2 * 1
    o = fulmen.attention(q, changed, v)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
