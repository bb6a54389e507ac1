# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Jagged nested tensors in compat.sdpa, torch.jit.trace, and DTensors split by batch or heads."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from long_run import full
from torch import nested
from torch.nn import functional

import fulmen
from fulmen.compat import sdpa

distributed = pytest.importorskip("torch.distributed")
HAS_PROCESSES = distributed.is_available()
OURS, THEIRS = sdpa.scaled_dot_product_attention, functional.scaled_dot_product_attention
LENGTHS = [5, 0, 1, 9]


def jagged(lengths: list[int], heads: int = 4, dim: int = 8) -> Any:
    """(batch, row, head, dim), a leaf."""
    parts = [torch.randn(n, heads, dim) for n in lengths]
    return nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def heads_first(*tensors: Any) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_jagged_tensors_are_each_sequence_alone(kv_heads: int, causal: bool) -> None:
    q, k, v = jagged(LENGTHS), jagged([4, 2, 3, 7], kv_heads), jagged([4, 2, 3, 7], kv_heads)
    v = nested.nested_tensor_from_jagged(v.values().detach(), k.offsets()).requires_grad_()
    options = {"is_causal": causal, "enable_gqa": kv_heads != 4}
    with sdpa.replaced(strict=True):
        o = functional.scaled_dot_product_attention(*heads_first(q, k, v), **options)
    same = (o.transpose(1, 2) + q).shape  # of one ragged structure
    assert same == q.shape
    do = torch.randn_like(o.values())
    found = torch.autograd.grad(o.values(), (q, k, v), do)
    values = [x.values().detach().requires_grad_() for x in (q, k, v)]
    parts = []
    for entries in zip(*(zip(x.offsets(), x.offsets()[1:]) for x in (q, k, v))):
        alone = [x[a:b].transpose(0, 1)[None] for x, (a, b) in zip(values, entries)]
        parts.append(THEIRS(*alone, **options)[0])
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(o.values(), expected)
    for one, other in zip(found, torch.autograd.grad(expected, values, do)):
        torch.testing.assert_close(one.values(), other)


def test_jagged_tensors_with_holes() -> None:
    """Rows of a padded batch: the values between the sequences are nobody's."""
    base = torch.randn(3, 10, 4, 8)
    starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([5, 3, 9])
    x = nested.narrow(base, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    with sdpa.replaced(strict=True):
        o = functional.scaled_dot_product_attention(x, x, x)
    for b, (start, length) in enumerate(zip(starts, lengths)):
        alone = base[b, start : start + length].transpose(0, 1)
        torch.testing.assert_close(o[b], THEIRS(alone, alone, alone))


def test_jagged_tensors_compile() -> None:
    torch._dynamo.reset()
    q = jagged([5, 1, 9])

    def attend(q: Any) -> Any:
        x = q.transpose(1, 2)
        return OURS(x, x, x, is_causal=True).transpose(1, 2)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    o, expected = compiled(q), attend(q)
    torch.testing.assert_close(o.values(), expected.values())
    (found,), (wanted,) = (torch.autograd.grad(x.values().square().sum(), q) for x in (o, expected))
    torch.testing.assert_close(found.values(), wanted.values())


@pytest.mark.parametrize("wrong", ["mask", "heads", "mixed", "axes"])
def test_jagged_calls_that_fulmen_has_not_are_said(wrong: str) -> None:
    q = jagged([5, 1, 9])
    args: list[Any] = heads_first(q, q, q)
    if wrong == "mask":
        args.append(torch.ones(9, 9, dtype=torch.bool))
    elif wrong == "heads":
        args[1:] = heads_first(*[jagged([5, 1, 9], heads=2)] * 2)
    elif wrong == "mixed":
        args[1] = torch.randn(3, 4, 9, 8)
    else:
        args = [q, q, q]
    with sdpa.replaced(strict=True), pytest.raises(fulmen.UnsupportedError, match="jagged"):
        functional.scaled_dot_product_attention(*args)


def test_a_traced_function_is_the_function() -> None:
    """For other lengths too, with gradients, and through torch's own function."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        o, lse = fulmen.attention(q, k, v, causal=True, mask=mask, return_lse=True)
        return o, lse, fulmen.attention(q, k, v, window=3)

    def inputs(rows: int, grad: bool) -> list[torch.Tensor]:
        arrays = [torch.randn(2, n, rows, 8, requires_grad=grad) for n in (4, 2, 2)]
        return [*arrays, torch.rand(rows, rows) > 0.2]

    traced = torch.jit.trace(attend, inputs(6, False))
    for rows in (6, 11):
        given = inputs(rows, True)
        found, expected = traced(*given), attend(*given)
        torch.testing.assert_close(found, expected)
        gradients = (
            torch.autograd.grad(sum(x.sin().sum() for x in out), given[:3])
            for out in (found, expected)
        )
        torch.testing.assert_close(*gradients)
    with sdpa.replaced(strict=True):
        whole = torch.jit.trace(
            lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
            (torch.randn(1, 2, 5, 8),),
        )
    x = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(whole(x), THEIRS(x, x, x, is_causal=True))


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of devices that are not there: what one of them computes is seen, and no message."""
    if not HAS_PROCESSES:
        pytest.skip("torch.distributed is not built")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape = request.param
    size = int(torch.tensor(shape).prod())
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    names = ("batch", "head")[-len(shape) :]
    yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    distributed.destroy_process_group()


def split(x: torch.Tensor, mesh: Any, *axes: int | None) -> Any:
    """This device's part of x as a DTensor: split along an axis by each dimension of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    places = [Replicate() if axis is None else Shard(axis) for axis in axes]
    own = x
    for axis, parts in zip(axes, mesh.shape):
        own = own if axis is None else own.chunk(parts, axis)[0]
    shape = {"shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(own.clone(), mesh, places, run_check=False, **shape)


# How the axes (batch, head) of a mesh split q: (axes of q, k, v, o; the same of lse).
MESHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "batch": ((2,), (0,)),
    "head": ((2,), (1,)),
    "batch and head": ((2, 4), (0, 1)),
}


@pytest.mark.parametrize(
    ("mesh", "axes"), MESHES.values(), ids=list(MESHES), indirect=["mesh"]
)  # fmt: skip
def test_dtensors_are_split_by_batch_and_heads_without_a_message(
    mesh: Any, axes: tuple[int, ...]
) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    q, k, v = torch.randn(4, 8, 6, 8), torch.randn(4, 4, 9, 8), torch.randn(4, 4, 9, 8)
    bias, sinks = torch.randn(8, 6, 9), torch.randn(8)
    lengths = torch.tensor([9, 4, 7, 2])
    given = [split(x, mesh, *axes).requires_grad_() for x in (q, k, v)]
    of_bias = [{0: None, 1: 0}[axis] for axis in axes]
    addends = [split(x, mesh, *of_bias).requires_grad_() for x in (bias, sinks)]
    of_lengths = [{0: 0, 1: None}[axis] for axis in axes]
    options = {"bias": addends[0], "sinks": addends[1]}
    with CommDebugMode() as messages:
        o, lse = fulmen.attention(
            *given, causal=True, kv_lengths=split(lengths, mesh, *of_lengths), return_lse=True,
            **options,
        )  # fmt: skip
        gradients = torch.autograd.grad((o.sum() + lse.sum()).to_local(), [*given, *addends])
    assert messages.get_total_counts() == 0
    places = tuple(Shard(axis) for axis in axes)
    assert o.placements == lse.placements == places
    for x in gradients[:3]:
        assert x.placements == places
    wanted = tuple(Partial() if axis is None else Shard(axis) for axis in of_bias)
    assert tuple(x.placements for x in gradients[3:]) == (wanted, wanted)
    local = [x.to_local().detach().requires_grad_() for x in (*given, *addends)]
    own_lengths = split(lengths, mesh, *of_lengths).to_local()
    expected, expected_lse = fulmen.attention(
        *local[:3], causal=True, kv_lengths=own_lengths, return_lse=True, bias=local[3],
        sinks=local[4],
    )  # fmt: skip
    torch.testing.assert_close(o.to_local(), expected)
    torch.testing.assert_close(lse.to_local(), expected_lse)
    of_local = torch.autograd.grad(expected.sum() + expected_lse.sum(), local)
    for one, other in zip(gradients, of_local):
        torch.testing.assert_close(one.to_local(), other)
    assert fulmen.attention(*(split(x, mesh, *[None] * len(axes)) for x in (q, k, v))
                            ).placements == (Replicate(),) * len(axes)  # fmt: skip


@pytest.mark.parametrize("mesh", [(2,)], indirect=True)
def test_dtensors_that_cannot_be_split_are_gathered(mesh: Any) -> None:
    """Rows, groups of heads that would be torn, and dropout."""
    from torch.distributed.tensor import Replicate, Shard

    def placed(heads: int, kv_heads: int, axis: int, **options: Any) -> Any:
        arrays = [split(torch.randn(2, n, 8, 8), mesh, axis) for n in (heads, kv_heads, kv_heads)]
        return fulmen.attention(*arrays, **options).placements

    assert placed(6, 3, 1) == (Replicate(),)
    assert placed(6, 6, 1) == placed(6, 2, 1) == (Shard(1),)
    assert placed(4, 2, 2) == (Replicate(),)
    with pytest.raises((RuntimeError, fulmen.Error), match=r"DTensor|dropout"):
        placed(4, 2, 1, dropout_p=0.5)


def _in_a_process(rank: int, port: int, expected: Any, q: Any, k: Any, v: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for axis in (0, 1, 2):  # rows are gathered
        given = [distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_() for x in (q, k, v)]
        o = fulmen.attention(*given, causal=True)
        gradients = torch.autograd.grad(o.full_tensor().square().sum(), given)
        found = [x.full_tensor() for x in (o, *gradients)]
        torch.testing.assert_close(found, expected)
    distributed.destroy_process_group()


@full
@pytest.mark.skipif(not HAS_PROCESSES, reason="torch.distributed is not built")
def test_two_processes_compute_what_one_does() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    q, k, v = (torch.randn(2, n, 6, 8, requires_grad=True) for n in (4, 2, 2))
    o = fulmen.attention(q, k, v, causal=True)
    expected = [o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v))]
    plain = [x.detach() for x in (q, k, v)]
    torch.multiprocessing.spawn(_in_a_process, (port, expected, *plain), nprocs=2)
