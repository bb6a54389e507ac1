# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of every option on an NVIDIA GPU.

Those of simt in float64 against finite differences; those of sm80 against simt's on the same
16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import autograd

import fulmen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")

BATCH, HEADS, KV_HEADS = 2, 4, 2
Options = dict[str, Any]


def documents(rows: int, keys: int) -> Any:
    """Four of them, of unequal lengths."""
    q_ids, kv_ids = (
        torch.arange(length, device="cuda", dtype=torch.int32).mul(4).div(length).int()
        for length in (rows, keys)
    )
    return fulmen.masks.documents(q_ids, kv_ids)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def hidden(rows: int, keys: int) -> torch.Tensor:
    mask = torch.rand(BATCH, 1, rows, keys, device="cuda") > 0.3
    mask[..., 0] = True
    return mask


# Of the numbers of rows and keys and the dtype of biases and sinks.
OPTIONS: dict[str, Callable[[int, int, torch.dtype], Options]] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"causal": True},
    "top_left": lambda *_: {"causal": True, "alignment": "top_left"},
    "window": lambda *_: {"window": (3, 2)},
    "prefix": lambda *_: {"causal": True, "mask": fulmen.masks.prefix(4)},
    "chunks": lambda *_: {"mask": fulmen.masks.chunks(5)},
    "documents": lambda rows, keys, _: {"mask": documents(rows, keys)},
    "mask": lambda rows, keys, _: {"mask": hidden(rows, keys)},
    "bias": lambda rows, keys, dtype: {
        "bias": torch.randn(BATCH, HEADS, rows, keys, device="cuda", dtype=dtype)
    },
    "bias of all": lambda rows, keys, dtype: {
        "bias": torch.randn(1, 1, rows, keys, device="cuda", dtype=dtype)
    },
    "alibi": lambda _rows, _keys, dtype: {
        "alibi_slopes": torch.rand(HEADS, device="cuda", dtype=wide(dtype))
    },
    "softcap": lambda *_: {"softcap": 1.5},
    "scale": lambda *_: {"scale": -0.3},
    "sinks": lambda _rows, _keys, dtype: {
        "sinks": torch.randn(HEADS, device="cuda", dtype=wide(dtype))
    },
    "dropout": lambda *_: {"dropout_p": 0.25, "rng": (7, 0)},
    "lengths": lambda rows, keys, _: {
        "q_lengths": torch.tensor([rows, rows // 2], device="cuda"),
        "kv_lengths": torch.tensor([keys - 1, keys], device="cuda"),
    },
}


def inputs(rows: int, keys: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(BATCH, heads, length, dim)
              for heads, length in ((HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys))]  # fmt: skip
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def leaves_of(options: Options) -> list[torch.Tensor]:
    return [options[name].requires_grad_() for name in ("bias", "sinks") if name in options]


@pytest.mark.parametrize("name", OPTIONS)
def test_simt_agrees_with_finite_differences(name: str) -> None:
    torch.manual_seed(1)
    options = OPTIONS[name](7, 9, torch.float64)
    names = [x for x in ("bias", "sinks") if x in options]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Any:
        given = {**options, **dict(zip(names, rest, strict=True))}
        o, lse = fulmen.attention(q, k, v, return_lse=True, implementation="simt", **given)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    leaves = inputs(7, 9, 5, torch.float64) + leaves_of(options)
    assert autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_sm80_agrees_with_simt(name: str, dim: int) -> None:
    torch.manual_seed(2)
    rows, keys = 200, 333
    options = OPTIONS[name](rows, keys, torch.bfloat16)
    leaves = inputs(rows, keys, dim, torch.bfloat16) + leaves_of(options)
    do = torch.randn(BATCH, HEADS, rows, dim, device="cuda", dtype=torch.bfloat16)
    found = {}
    for implementation in ("simt", "sm80"):
        o = fulmen.attention(*leaves[:3], implementation=implementation, **options)
        found[implementation] = torch.autograd.grad(o, leaves, do)
    for simt, sm80 in zip(found["simt"], found["sm80"], strict=True):
        error = (sm80.float() - simt.float()).norm() / simt.float().norm()
        assert error < 1.5e-2  # P and dS are rounded to 8 bits beside the results
