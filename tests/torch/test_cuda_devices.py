# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Two GPUs in one process: calls on the one that is not current, and CUDA graphs on both.

Skipped with fewer than two.
"""

from __future__ import annotations

import pytest
import torch
from test_cuda import close, inputs

import fulmen

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two NVIDIA GPUs")


def test_the_gpu_of_q_need_not_be_the_current_one() -> None:
    leaves = inputs()
    there = [x.detach().to("cuda:1").requires_grad_() for x in leaves]
    with torch.cuda.device(0):
        o = fulmen.attention(*there, causal=True)
        found = torch.autograd.grad(o.float().sum(), there)
        assert torch.cuda.current_device() == 0
    expected = fulmen.attention(*leaves, causal=True)
    assert o.device == there[0].device
    close([o.cpu()], [expected.cpu()], torch.bfloat16)
    here = torch.autograd.grad(expected.float().sum(), leaves)
    close([x.cpu() for x in found], [x.cpu() for x in here], torch.bfloat16)
    with pytest.raises(fulmen.Error, match="k"):
        fulmen.attention(there[0], leaves[1], there[2])


def test_graphs_on_two_gpus_replay_in_turn() -> None:
    found = []
    for ordinal in (1, 0):
        with torch.cuda.device(ordinal):
            q, k, v = (x.to(f"cuda:{ordinal}") for x in inputs(grad=False))
            fulmen.attention(q, k, v, causal=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own is of one GPU
                o = fulmen.attention(q, k, v, causal=True)
        found.append((ordinal, graph, (q, k, v), o))
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = inputs(grad=False)
        for ordinal, graph, given, _ in found:
            with torch.cuda.device(ordinal):
                for x, y in zip(given, fresh):
                    x.copy_(y)
                graph.replay()
        for ordinal in (0, 1):
            torch.cuda.synchronize(ordinal)
        expected = fulmen.attention(*fresh, causal=True)
        for _, _, _, o in found:
            assert torch.equal(o.to("cuda:0"), expected)
