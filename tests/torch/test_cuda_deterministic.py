# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Deterministic gradients on an NVIDIA GPU: the same bits in 200 runs beside other work."""

from __future__ import annotations

import pytest
import torch

import fulmen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
RUNS = 200
DIMS = {"sm90": (64, 128, 192, 256, 320), "sm80": (40, 64, 80, 96, 128, 192, 256, 320, 512)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("implementation", "dim"), [(name, dim) for name, dims in DIMS.items() for dim in dims]
)
def test_the_same_bits_in_every_run(implementation: str, dim: int, causal: bool) -> None:
    if implementation == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    rows = 1000 if causal else 1300  # beyond 1,024 sums of dQ have an order on Hopper
    q, k, v, do = (torch.randn(1, 40, rows, dim, device="cuda").bfloat16() for _ in range(4))
    made = fulmen.attention_forward(q, k, v, causal=causal)

    def gradients() -> torch.Tensor:
        found = fulmen.attention_backward(
            do, q, k, v, made.o, made.stats, causal=causal, deterministic=True,
            implementation=implementation,
        )  # fmt: skip
        return torch.stack([found.dq, found.dk, found.dv]).view(torch.int16)

    first = gradients()
    load = torch.randn(4096, 4096, device="cuda")
    beside = torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(RUNS):
        if run % 2 == 0:
            with torch.cuda.stream(beside):
                load @ load
        differing += (gradients() != first).any()
    assert int(differing) == 0
