# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The forward pass on an NVIDIA GPU gives the same bits in every run, also while other kernels come
and go on another stream and take multiprocessors, cache and memory away. Skipped without a GPU.

FULMEN_TEST_FULL=1 repeats every problem 1,000 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from long_run import IS_FULL

import fulmen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
RUNS = 1000 if IS_FULL else 60


def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, device="cuda", dtype=dtype)


def disturbances() -> list[Callable[[], Any]]:
    """Work for another stream: many blocks, few long ones, much memory, a full L2."""
    x, y, big = normal(2048, 2048), normal(2048, 2048), normal(1 << 26)
    small = normal(2, 8, 300, 64)
    return [
        lambda: x @ y,
        lambda: torch.cuda._sleep(200_000),
        big.clone,
        big.zero_,
        lambda: fulmen.attention(small, small, small, causal=True),
    ]


OFFSETS = [0, 3, 700, 701, 1500]
PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "d 64, causal": ((2, 16, 1024, 64), {"causal": True}),
    "d 64, one wave": ((1, 8, 128, 64), {}),
    "d 128, full": ((2, 16, 1030, 128), {}),
    "d 128, window": ((1, 16, 2000, 128), {"causal": True, "window": (300, 0)}),
    "d 128, packed": ((16, 1500, 128), {"causal": True}),
    "d 256, softcap": ((1, 16, 1024, 256), {"causal": True, "softcap": 30.0}),
    "d 512": ((1, 4, 512, 512), {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_run_gives_the_same_bits(name: str, dtype: Any) -> None:
    shape, options = PROBLEMS[name]
    q, k, v = (normal(*shape, dtype=dtype) for _ in range(3))
    call: Callable[..., Any] = fulmen.attention
    if len(shape) == 3:
        at = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
        call = fulmen.attention_varlen
        options = {**options, "cu_q": at, "cu_kv": at, "max_q": 800, "max_kv": 800, "layout": "hsd"}
    expected = call(q, k, v, return_lse=True, **options)
    torch.cuda.synchronize()
    others, stream = disturbances(), torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(RUNS):
        if run % 2 == 1:
            with torch.cuda.stream(stream):
                others[run // 2 % len(others)]()
        for got, x in zip(call(q, k, v, return_lse=True, **options), expected):
            differing += (got != x).any()
    torch.cuda.synchronize()
    assert differing.item() == 0


@pytest.mark.parametrize("shape", [(1, 8, 128, 64), (2, 16, 512, 128), (1, 8, 700, 256)])
def test_a_call_waits_for_those_before_it(shape: tuple[int, ...]) -> None:
    """A kernel may start while the one before it ends: it must not read or write too early."""
    pairs = [(normal(*shape), normal(*shape)) for _ in range(3)]
    first = normal(*shape)

    def chain(waits: bool) -> Any:
        """Every result: an error in one is forgotten by those a few calls later."""
        made = [first, *(torch.empty_like(first) for _ in range(RUNS))]
        for step in range(RUNS):
            k, v = pairs[step % len(pairs)]
            fulmen.attention(made[step], k, v, out=made[step + 1])
            if waits:
                torch.cuda.synchronize()
        return torch.stack(made)

    def shuttle() -> Any:
        """The last of two results in turns: neither may be written while it is still read."""
        x, y = first.clone(), torch.empty_like(first)
        for step in range(RUNS):
            k, v = pairs[step % len(pairs)]
            fulmen.attention(x, k, v, out=y)
            x, y = y, x
        return x

    expected = chain(waits=True)
    assert torch.equal(chain(waits=False), expected)
    assert torch.equal(shuttle(), expected[-1])
