# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch layer on an NVIDIA GPU: streams, CUDA graphs, devices. Skipped without one.

Exactness of the kernels is the matter of fulmen verify and tests/cuda/gpu.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import fulmen
from fulmen.compat import sdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
THEIRS = torch.nn.functional.scaled_dot_product_attention


def inputs(dtype: Any = torch.bfloat16, rows: int = 128, grad: bool = True) -> list[torch.Tensor]:
    return [
        torch.randn(2, 4, rows, 64, device="cuda", dtype=dtype, requires_grad=grad)
        for _ in range(3)
    ]


def close(found: Any, expected: Any, dtype: Any) -> None:
    for ours, other in zip(found, expected):
        scale = other.abs().max().clamp(min=1e-3)
        error = (ours.float() - other.float()).abs().max() / scale
        assert error < {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_against_torch(dtype: Any, causal: bool) -> None:
    leaves = inputs(dtype)
    do = torch.randn_like(leaves[0])
    o = fulmen.attention(*leaves, causal=causal)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = THEIRS(*wide, is_causal=causal)
    close([o], [expected], dtype)
    close(
        torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, wide, do.double()), dtype
    )


def test_compiled_and_reduce_overhead() -> None:
    leaves = inputs(grad=False)
    expected = fulmen.attention(*leaves, causal=True)
    for mode in ("default", "reduce-overhead"):
        step = torch.compile(
            lambda q, k, v: fulmen.attention(q, k, v, causal=True) * 2, fullgraph=True, mode=mode
        )
        for _ in range(3):
            found = step(*leaves)
        close([found], [expected * 2], torch.bfloat16)


def test_a_captured_training_step_follows_new_contents() -> None:
    leaves = inputs()
    do = torch.randn_like(leaves[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(fulmen.attention(*leaves, causal=True), leaves, do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        o = fulmen.attention(*leaves, causal=True)
        gradients = torch.autograd.grad(o, leaves, do)
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    again = fulmen.attention(*leaves, causal=True)
    close([o, *gradients], [again, *torch.autograd.grad(again, leaves, do)], torch.bfloat16)


def test_dropout_draws_anew_at_every_replay() -> None:
    q, k, v = inputs(grad=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        fulmen.attention(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fulmen.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = o.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(first, o)
    torch.cuda.manual_seed(3)
    one = fulmen.attention(q, k, v, dropout_p=0.5)
    torch.cuda.manual_seed(3)
    assert torch.equal(one, fulmen.attention(q, k, v, dropout_p=0.5))


def test_work_goes_to_the_current_stream() -> None:
    q, k, v = inputs(rows=1024, grad=False)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        q2 = q * 2
        o = fulmen.attention(q2, k, v)
    assert not stream.query()
    stream.synchronize()
    close([o], [fulmen.attention(q * 2, k, v)], torch.bfloat16)


def test_threads_at_once() -> None:
    leaves = inputs(grad=False)
    expected = fulmen.attention(*leaves)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            o = fulmen.attention(*leaves)
            torch.cuda.current_stream().synchronize()
            found.append(o)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    close(found, [expected] * 4, torch.bfloat16)


def test_arrays_in_two_places_are_refused_by_name() -> None:
    q, k, v = inputs(grad=False)
    with pytest.raises(fulmen.Error, match="k"):
        fulmen.attention(q, k.cpu(), v)
    with pytest.raises(fulmen.Error, match="kv_lengths"):
        fulmen.attention(q, k, v, kv_lengths=torch.tensor([1, 2]))
    o = fulmen.attention(q, k, v, kv_lengths=[64, 0])
    assert o[1].eq(0).all()


def test_a_whole_model_by_sdpa() -> None:
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, device="cuda", dtype=torch.float16
    )
    x = torch.randn(2, 33, 64, device="cuda", dtype=torch.float16)
    expected = layer(x)
    with sdpa.replaced(strict=True):
        close([layer(x)], [expected], torch.float16)
