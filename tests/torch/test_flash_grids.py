# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's grids through its names: float64 on the CPU, 16-bit on a GPU where there is one.

FULMEN_TEST_FULL=1 draws hundreds of cases of every size; else few, and on the CPU short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grids
import pytest
import torch
from grids import Case, drawn
from long_run import IS_FULL
from reference import inputs, reference

import fulmen
from fulmen.compat import bert_padding, flash_attn, flash_attn_3, flash_attn_4

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


def by_fa4(case: Case, slopes: Any, sinks: Any, *arrays: Any) -> Any:
    return flash_attn_4.flash_attn_func(
        *arrays, causal=case.causal, window_size=case.window or (None, None), softcap=case.softcap,
        learnable_sink=sinks, deterministic=case.deterministic, return_lse=True,
    )  # fmt: skip


def by_fa2_qkv(case: Case, slopes: Any, sinks: Any, *arrays: Any) -> Any:
    return flash_attn.flash_attn_qkvpacked_func(
        torch.stack(arrays, 2), causal=case.causal, window_size=case.window or (-1, -1),
        alibi_slopes=slopes, return_attn_probs=True,
    )[:2]  # fmt: skip


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
    check(by_fa4, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.fa2_qkvpacked(), 60, 4)
def test_the_packed_grid_of_fa2(case: Case, dtype: Any) -> None:
    check(by_fa2_qkv, case, dtype)


def compare(found: Any, truth: Any, plain: Any, dtype: Any) -> None:
    if dtype is torch.float64:
        torch.testing.assert_close(found, truth)
    else:
        agree(found, plain(), truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.fa2_dropout(), 100, 6)
def test_the_dropout_grid_of_fa2(case: Case, dtype: Any) -> None:
    """With the pattern that S_dmask tells, forward and backward."""
    leaves = inputs(2, 6, case.kv_heads, *case.rows, *case.dims, dtype=dtype, device=DEVICE)
    slopes = torch.rand(6, device=DEVICE) * 0.3 if case.alibi else None
    o, _, s = flash_attn.flash_attn_func(
        *(x.transpose(1, 2) for x in leaves), dropout_p=case.dropout, causal=case.causal,
        window_size=case.window or (-1, -1), alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    kept = round((1 - case.dropout) * 65536) / 65536
    keep, options = (s >= 0) / kept, options_of(case, slopes)
    do = torch.randn_like(o.transpose(1, 2))

    def results(given: Any) -> list[Any]:
        attended = reference(*given, **options, keep=keep.to(given[0].dtype))[0]
        return [attended, *torch.autograd.grad(attended, given, do.to(attended.dtype))]

    found = [o.transpose(1, 2), *torch.autograd.grad(o.transpose(1, 2), leaves, do)]
    truth = results([x.detach().double().requires_grad_() for x in leaves])
    compare(found, truth, lambda: results(leaves), dtype)


def by_varlen(case: Case, slopes: Any, q: Any, k: Any, v: Any, cu: Any, longest: Any) -> Any:
    options = {"causal": case.causal, "window_size": case.window or (-1, -1),
               "softcap": case.softcap}  # fmt: skip
    if case.chunk:
        return flash_attn_3.flash_attn_varlen_func(
            q, k, v, *cu, *longest, attention_chunk=case.chunk, **options
        )
    if case.form == "kv":
        kv = torch.stack([k, v], 1)
        return flash_attn.flash_attn_varlen_kvpacked_func(
            q, kv, *cu, *longest, alibi_slopes=slopes, **options
        )
    return flash_attn.flash_attn_varlen_func(q, k, v, *cu, *longest, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.fa2_varlen(), 200, 8)
def test_the_varlen_grid_of_fa2(case: Case, dtype: Any) -> None:
    check_varlen(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.fa3_varlen(), 150, 6)
def test_the_varlen_grid_of_fa3(case: Case, dtype: Any) -> None:
    check_varlen(case, dtype)


def check_varlen(case: Case, dtype: Any) -> None:
    """Padded batches whose entries have lengths of their own: each is as if alone."""
    q_rows = case.rows[0]
    leaves = inputs(3, 6, case.kv_heads, *case.rows, *case.dims, dtype=dtype, device=DEVICE)
    slopes = torch.rand(6, device=DEVICE) * 0.3 if case.alibi else None
    lengths = [torch.tensor([n, max(1, n - 9), max(1, n // 3)], device=DEVICE) for n in case.rows]
    masks = [torch.arange(n, device=DEVICE) < x[:, None] for n, x in zip(case.rows, lengths)]
    packed = [bert_padding.unpad_input(x.transpose(1, 2), masks[int(i > 0)])
              for i, x in enumerate(leaves)]  # fmt: skip
    rows = [x[0] for x in packed]
    cu, longest = [x[2] for x in packed[:2]], [x[3] for x in packed[:2]]
    o = by_varlen(case, slopes, *rows, cu, longest)
    padded = bert_padding.pad_input(o, packed[0][1], 3, q_rows).transpose(1, 2)
    do = torch.randn_like(padded)

    def results(given: Any) -> list[Any]:
        parts = []
        for b, (m, n) in enumerate(zip(*(x.tolist() for x in lengths))):
            alone = (given[0][b : b + 1, :, :m], *(x[b : b + 1, :, :n] for x in given[1:]))
            attended = reference(*alone, **options_of(case, slopes))[0]
            parts.append(torch.nn.functional.pad(attended, (0, 0, 0, q_rows - m)))
        whole = torch.cat(parts)
        return [whole, *torch.autograd.grad(whole, given, do.to(whole.dtype))]

    found = [padded, *torch.autograd.grad(padded, leaves, do)]
    truth = results([x.detach().double().requires_grad_() for x in leaves])
    compare(found, truth, lambda: results(leaves), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.caches(), 150, 8)
def test_the_grid_of_caches(case: Case, dtype: Any) -> None:
    """Contiguous caches of FA2 and FA3: lengths, new keys, entries by index."""
    rows, slots = case.rows
    batch, size = 2, 3 if case.entries else 2
    q, *cache = (x.detach().transpose(1, 2) for x in
                 inputs(size, 6, case.kv_heads, rows, slots, *case.dims, dtype=dtype,
                        device=DEVICE))  # fmt: skip
    q, new = q[:batch], [torch.randn_like(x[:batch, :rows]) for x in cache]
    index = torch.randperm(size, device=DEVICE)[:batch].int() if case.entries else None
    most = slots - rows if case.new else slots
    used = torch.tensor([most, min(most, slots // 3)], device=DEVICE, dtype=torch.int32)
    slopes = torch.rand(6, device=DEVICE) * 0.3 if case.alibi else None
    expected = [x.clone() for x in cache]
    total = used + rows if case.new else used
    found = []
    for b in range(batch):
        slot = b if index is None else int(index[b])
        if case.new:
            for x, fresh in zip(expected, new):
                x[slot, int(used[b]) : int(total[b])] = fresh[b]
        alone = [x[slot : slot + 1, : int(total[b])] for x in expected]
        found.append([x.transpose(1, 2) for x in (q[b : b + 1], *alone)])
    call = flash_attn.flash_attn_with_kvcache
    given = {"cache_seqlens": used, "cache_batch_idx": index, "causal": case.causal,
             "window_size": case.window or (-1, -1)}  # fmt: skip
    if case.alibi:
        given["alibi_slopes"] = slopes
    else:
        call = flash_attn_3.flash_attn_with_kvcache
    o = call(q, *cache, *(new if case.new else (None, None)), **given).transpose(1, 2)
    for x, whole in zip(cache, expected):
        assert torch.equal(x, whole)

    def results(dtype: Any) -> list[Any]:
        parts = [reference(*(x.to(dtype) for x in arrays), **options_of(case, slopes))[0]
                 for arrays in found]  # fmt: skip
        return [torch.cat(parts)]

    compare([o], results(torch.float64), lambda: results(dtype), dtype)
