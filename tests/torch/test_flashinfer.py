# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's names: each wrapper against each request alone, from contiguous keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fulmen
from fulmen.compat import flashinfer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.float64
HEADS, KV_HEADS, DIM = 6, 2, 16
LENGTHS = [9, 0, 4, 33]


def paged(page_size: int, kv_layout: str) -> tuple[Any, ...]:
    """The keys and values of each request, a cache that holds them, and its table."""
    counts = [-(-n // page_size) for n in LENGTHS]
    order = torch.randperm(sum(counts) + 2)
    pool = torch.full((len(order), 2, page_size, KV_HEADS, DIM), torch.nan, dtype=WIDE)
    requests, first = [], 0
    for n, count in zip(LENGTHS, counts):
        own = torch.randn(2, n, KV_HEADS, DIM, dtype=WIDE)
        requests.append(own.to(DEVICE))
        for j in range(n):
            pool[order[first + j // page_size], :, j % page_size] = own[:, j]
        first += count
    if kv_layout == "HND":
        pool = pool.transpose(2, 3).contiguous()
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in LENGTHS]).int()
    table = [x.to(DEVICE) for x in (indptr, order[: sum(counts)].int(), last)]
    return requests, pool.to(DEVICE), table


def alone(q: Any, kv: Any, **options: Any) -> Any:
    """o and lse (row, head) in base 2 of queries (row, head, dim)."""
    o, lse = fulmen.attention(q, *kv, layout="shd", return_lse=True, **options)
    return o, lse.transpose(0, 1) / math.log(2)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode(page_size: int, kv_layout: str) -> None:
    requests, pool, table = paged(page_size, kv_layout)
    q = torch.randn(len(LENGTHS), HEADS, DIM, dtype=WIDE, device=DEVICE)
    workspace = torch.empty(1, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout)
    indptr, indices, last = table
    plan = (HEADS, KV_HEADS, DIM, page_size)
    wrapper.plan(indptr.cpu(), indices, last.cpu(), *plan, window_left=7, logits_soft_cap=5.0,
                 q_data_type=WIDE)  # fmt: skip
    o, lse = wrapper.run(q, pool, return_lse=True, k_scale=0.5, v_scale=2.0)
    assert lse.shape == (len(LENGTHS), HEADS)
    for b, kv in enumerate(requests):
        wanted, wanted_lse = alone(q[b : b + 1], kv, window=(7, 0), softcap=5.0,
                                   scale=0.5 / math.sqrt(DIM))  # fmt: skip
        torch.testing.assert_close(o[b], 2 * wanted[0])
        torch.testing.assert_close(lse[b], wanted_lse[0])
    out = torch.empty_like(o)
    wrapper.plan(indptr, indices, last, *plan)
    pair = pool.unbind(1)
    assert wrapper.run(q, pair, out=out) is out
    torch.testing.assert_close(out[3], alone(q[3:], requests[3])[0][0])


@pytest.mark.parametrize("causal", [False, True])
def test_paged_prefill(causal: bool) -> None:
    requests, pool, table = paged(4, "NHD")
    counts = [3, 0, 2, 7]
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    q = torch.randn(sum(counts), HEADS, DIM, dtype=WIDE, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, device=DEVICE))
    wrapper.plan(offsets, *table, HEADS, KV_HEADS, DIM, 4, causal=causal, sm_scale=0.3)
    o, lse = wrapper.run(q, pool, return_lse=True)
    for b, kv in enumerate(requests):
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        wanted, wanted_lse = alone(q[rows], kv, causal=causal, scale=0.3)
        torch.testing.assert_close(o[rows], wanted)
        torch.testing.assert_close(lse[rows], wanted_lse)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged_prefill(kv_layout: str) -> None:
    q = torch.randn(7, HEADS, DIM, dtype=WIDE, device=DEVICE)
    k, v = torch.randn(2, 12, KV_HEADS, DIM, dtype=WIDE, device=DEVICE)
    cu_q, cu_kv = (torch.tensor(x, device=DEVICE).int() for x in ([0, 3, 7], [0, 5, 12]))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, kv_layout)
    wrapper.plan(cu_q, cu_kv, HEADS, KV_HEADS, DIM, causal=True)
    given = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    o, lse = wrapper.run(q, *given, return_lse=True)
    wanted, wanted_lse = alone(q[3:], torch.stack([k, v])[:, 5:], causal=True)
    torch.testing.assert_close(o[3:], wanted)
    torch.testing.assert_close(lse[3:], wanted_lse)


def test_a_cascade_is_what_its_levels_are_together() -> None:
    """Five requests that share 8 keys: one level for these, one for what each has itself."""
    shared = torch.randn(2, 8, KV_HEADS, DIM, dtype=WIDE, device=DEVICE)
    own = [torch.randn(2, n, KV_HEADS, DIM, dtype=WIDE, device=DEVICE) for n in (4, 8, 3, 1, 4)]
    pages = [*shared.split(4, 1)]
    indptr, indices, last = [0], [], []
    for x in own:
        for part in x.split(4, 1):
            padding = (0, 0, 0, 0, 0, 4 - part.shape[1])
            pages.append(torch.nn.functional.pad(part, padding, value=torch.nan))
            indices.append(len(pages) - 1)
        indptr.append(len(indices))
        last.append((x.shape[1] - 1) % 4 + 1)
    pool = torch.stack(pages)
    q = torch.randn(5, HEADS, DIM, dtype=WIDE, device=DEVICE)

    def made(*lists: list[int]) -> list[Any]:
        return [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in lists]

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1, device=DEVICE))
    wrapper.plan(made([0, 5], list(range(6))), made([0, 2], indptr), made([0, 1], indices),
                 made([4], last), HEADS, KV_HEADS, DIM, 4, causal=True)  # fmt: skip
    o = wrapper.run(q, pool)
    for b, x in enumerate(own):
        whole = torch.cat([shared, x], 1)
        torch.testing.assert_close(o[b], alone(q[b : b + 1], whole)[0][0])
    with pytest.raises(fulmen.ArgumentError, match="2 levels"):
        wrapper.plan(made([0, 5]), made([0, 2]), made([0, 1]), made([4]), HEADS, KV_HEADS, DIM, 4)
    with pytest.raises(fulmen.ArgumentError, match="num_levels"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0)


def test_single_requests_and_merges_in_base_2() -> None:
    q = torch.randn(5, HEADS, DIM, dtype=WIDE, device=DEVICE)
    kv = torch.randn(2, 12, KV_HEADS, DIM, dtype=WIDE, device=DEVICE)
    o, lse = flashinfer.single_prefill_with_kv_cache(q, *kv, causal=True, return_lse=True)
    wanted = alone(q, kv, causal=True)
    torch.testing.assert_close((o, lse), wanted)
    mask = torch.rand(5, 12, device=DEVICE) < 0.5
    masked = flashinfer.single_prefill_with_kv_cache(
        q, *kv.transpose(1, 2), causal=True, custom_mask=mask, kv_layout="HND"
    )
    torch.testing.assert_close(masked, alone(q, kv, mask=mask)[0])
    one, one_lse = flashinfer.single_decode_with_kv_cache(q[0], *kv, return_lse=True)
    wanted = alone(q[:1], kv)
    torch.testing.assert_close((one, one_lse), (wanted[0][0], wanted[1][0]))
    (a, s_a), (b, s_b) = (alone(q, kv[:, keys]) for keys in (slice(0, 5), slice(5, 12)))
    whole = alone(q, kv)
    torch.testing.assert_close(flashinfer.merge_state(a, s_a, b, s_b), whole)
    stacked = torch.stack([a, b], 1), torch.stack([s_a, s_b], 1)
    torch.testing.assert_close(flashinfer.merge_states(*stacked), whole)
    kept, kept_s = a.clone(), s_a.clone()
    wanted_rows = torch.tensor([True, False, True, True, False], device=DEVICE)
    flashinfer.merge_state_in_place(kept, kept_s, b, s_b, wanted_rows)
    torch.testing.assert_close(kept[wanted_rows], whole[0][wanted_rows])
    assert torch.equal(kept[~wanted_rows], a[~wanted_rows])
    assert torch.equal(kept_s[~wanted_rows], s_a[~wanted_rows])


def test_what_is_refused_is_refused_by_name() -> None:
    _, pool, table = paged(4, "NHD")
    q = torch.randn(len(LENGTHS), HEADS, DIM, dtype=WIDE, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    plan = (*table, HEADS, KV_HEADS, DIM, 4)
    with pytest.raises(fulmen.UnsupportedError, match="pos_encoding_mode"):
        wrapper.plan(*plan, pos_encoding_mode="ROPE_LLAMA")
    wrapper.plan(*plan)
    with pytest.raises(fulmen.UnsupportedError, match="kv_cache_sf"):
        wrapper.run(q, pool, kv_cache_sf=torch.ones(1))
    with pytest.raises(fulmen.ArgumentError, match="kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "DHN")
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
    with pytest.raises(fulmen.UnsupportedError, match="custom_mask"):
        prefill.plan(torch.tensor([0, 1]), *plan, custom_mask=torch.ones(1))
    with pytest.raises(fulmen.UnsupportedError, match="scale_k"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, scale_k=torch.ones(1))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_appended_rows_lie_behind_the_keys_of_their_requests(
    page_size: int, kv_layout: str
) -> None:
    requests, pool, (indptr, indices, last) = paged(page_size, kv_layout)
    expected = pool.clone()
    counts = torch.tensor([3, 0, 4, 1], device=DEVICE)  # the last keys of each, written anew
    append_indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    lengths = torch.tensor(LENGTHS, device=DEVICE).int()
    batch_indices, positions = flashinfer.get_batch_indices_positions(append_indptr, lengths, 8)
    assert batch_indices.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert positions.tolist() == [6, 7, 8, 0, 1, 2, 3, 32]
    new = torch.cat([own[:, n - count :] for own, n, count in zip(requests, LENGTHS, counts)], 1)
    for b, position in zip(batch_indices.tolist(), positions.tolist()):
        page = indices[indptr[b] + position // page_size]
        pool.select(2 if kv_layout == "NHD" else 3, position % page_size)[page] = torch.nan
    assert not torch.equal(torch.isnan(pool), torch.isnan(expected))
    flashinfer.append_paged_kv_cache(
        new[0], new[1], batch_indices, positions, pool, indices, indptr, last, kv_layout
    )
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
