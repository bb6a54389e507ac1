# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's grids through its names: float64 on the CPU, 16-bit on a GPU where there is one.

FULMEN_TEST_FULL=1 draws 400, 300 and 300 cases of every size; else few, and on the CPU short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grids
import pytest
import torch
from conftest import IS_FULL
from grids import Case, drawn
from reference import inputs, reference

import fulmen
from fulmen.compat import flash_attn, flash_attn_3

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float64]


def cases(grid: Iterator[Case], full: int, few: int) -> Any:
    """A pytest parameter `case`."""
    is_long = IS_FULL or ON_GPU
    every = [case for case in grid if is_long or max(case.rows) <= 256]
    number = full if IS_FULL else few
    return pytest.mark.parametrize("case", drawn(every, number), ids=str)


def by_fa2(case: Case, slopes: Any, sinks: Any, *arrays: Any) -> Any:
    return flash_attn.flash_attn_func(
        *arrays, causal=case.causal, window_size=case.window or (-1, -1), softcap=case.softcap,
        alibi_slopes=slopes, return_attn_probs=True,
    )[:2]  # fmt: skip


def by_fa3(case: Case, slopes: Any, sinks: Any, *arrays: Any) -> Any:
    return flash_attn_3.flash_attn_func(
        *arrays, causal=case.causal, window_size=case.window or (-1, -1), softcap=case.softcap,
        attention_chunk=case.chunk, return_attn_probs=True,
    )  # fmt: skip


def by_attention(case: Case, slopes: Any, sinks: Any, *arrays: Any) -> Any:
    return fulmen.attention(
        *arrays, **options_of(case, slopes), sinks=sinks, deterministic=case.deterministic,
        layout="bshd", return_lse=True,
    )  # fmt: skip


def options_of(case: Case, slopes: Any) -> dict[str, Any]:
    """`case` as the reference reads it: a causal window has nothing to its right."""
    window = case.window and (case.window[0], 0 if case.causal else case.window[1])
    mask = fulmen.masks.chunks(case.chunk) if case.chunk else None
    return {"causal": case.causal, "softcap": case.softcap, "alibi_slopes": slopes,
            "window": window, "mask": mask}  # fmt: skip


def check(attend: Any, case: Case, dtype: Any) -> None:
    q, k, v = inputs(2, 6, case.kv_heads, *case.rows, *case.dims, dtype=dtype, device=DEVICE)
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32
    slopes = torch.rand(6, device=DEVICE, dtype=accumulator) * 0.3 if case.alibi else None
    sinks = torch.randn(6, device=DEVICE, dtype=accumulator, requires_grad=True)
    leaves = [q, k, v, sinks] if case.sinks else [q, k, v]
    options = options_of(case, slopes)

    def results(o: Any, given: Any) -> list[Any]:
        return [o, *torch.autograd.grad(o, given, do.to(o.dtype))]

    def plain(given: Any) -> Any:
        logits = given[3].to(given[0].dtype) if case.sinks else None
        return reference(*given[:3], **options, sinks=logits)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, exact_lse = plain(wide)
    do = torch.randn_like(exact).to(dtype)
    o, lse = attend(case, slopes, sinks if case.sinks else None,
                    *(x.transpose(1, 2) for x in (q, k, v)))  # fmt: skip
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    close = 1e-9 if dtype is torch.float64 else 1e-3
    torch.testing.assert_close(lse[seen].double(), exact_lse[seen], atol=close, rtol=close)
    found, truth = results(o.transpose(1, 2), leaves), results(exact, wide)
    if dtype is torch.float64:
        torch.testing.assert_close(found, truth)
    else:
        agree(found, results(plain(leaves)[0], leaves), truth, dtype)


def agree(found: list[Any], others: list[Any], truth: list[Any], dtype: Any) -> None:
    """FlashAttention's own rule: at most twice (gradients: three times) the error of plain torch in
    the same dtype."""
    for name, ours, other, exact in zip(("o", "dq", "dk", "dv", "dsinks"), found, others, truth):
        error, allowed = (float((x - exact).detach().abs().max()) for x in (ours, other))
        floor = 2 * torch.finfo(dtype).eps * max(0.3, float(exact.detach().abs().max()))
        assert error <= (2 if name == "o" else 3) * allowed + floor, name


@pytest.mark.parametrize("dtype", DTYPES)
@cases(grids.fa2(), 400, 16)
def test_the_grid_of_fa2(case: Case, dtype: Any) -> None:
    check(by_fa2, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@cases(grids.fa3(), 300, 10)
def test_the_grid_of_fa3(case: Case, dtype: Any) -> None:
    check(by_fa3, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES[-1:])
@cases(grids.fa4(), 300, 10)
def test_the_grid_of_fa4(case: Case, dtype: Any) -> None:
    check(by_attention, case, dtype)
