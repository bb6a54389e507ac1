# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's caches through its names: pages, padding, new keys, rotary embeddings.

Each request alone, from contiguous keys and with rotations as products of complex numbers, is the
truth. FULMEN_TEST_FULL=1 draws hundreds of cases of every size.
"""

from __future__ import annotations

from typing import Any

import grids
import numpy as np
import pytest
import torch
from grids import Case
from reference import reference
from test_flash_grids import DEVICE, DTYPES, cases, compare, options_of

import fulmen
from fulmen.compat import flash_attn as fa2
from fulmen.compat import flash_attn_3 as fa3
from fulmen.compat import flash_attn_4 as fa4
from fulmen.compat import flash_rotary
from fulmen.lab.cases.views import far


def turned(x: Any, cos: Any, sin: Any, position: Any, is_interleaved: bool) -> Any:
    """Rows (row, head, dim) rotated by their positions: complex numbers times e^(i angle)."""
    half = cos.shape[1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = part.unflatten(-1, (half, 2)) if is_interleaved else (
        part.unflatten(-1, (2, half)).transpose(-1, -2)
    )  # fmt: skip
    unit = torch.complex(cos, sin)[position][:, None]
    made = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * unit)
    made = made.flatten(-2) if is_interleaved else made.transpose(-1, -2).flatten(-2)
    return torch.cat([made, rest], -1)


def paged(x: Any, page: int) -> tuple[Any, Any]:
    """(batch, row, head, dim) -> pages in a random order, others between, and their table."""
    batch, rows = x.shape[:2]
    per = -(-rows // page)
    padding = (0, 0, 0, 0, 0, per * page - rows)
    pages = torch.nn.functional.pad(x, padding).unflatten(1, (per, page)).flatten(0, 1)
    pool = torch.full((len(pages) + 3, *pages.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    order = torch.randperm(len(pool), device=x.device)[: len(pages)]
    pool[order] = pages
    return pool, order.view(batch, per).int()


def unpaged(pool: Any, table: Any, rows: int) -> Any:
    return pool[table.long()].flatten(1, 2)[:, :rows]


@pytest.mark.parametrize("dtype", DTYPES[:1])
@cases(grids.paged_caches(), 200, 20)
def test_the_grid_of_paged_caches(case: Case, dtype: Any) -> None:
    rows, slots = case.rows
    dim = case.dims[0]
    q = torch.randn(2, rows, 6, dim, dtype=dtype, device=DEVICE)
    cache = [torch.randn(2, slots, case.kv_heads, dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    new = [torch.randn(2, rows, case.kv_heads, dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    most = slots - rows if case.new else slots
    used = torch.tensor([most, min(most, slots // 3)], device=DEVICE, dtype=torch.int32)
    start = used // 3 if case.padded else None
    half = int(case.rotary * dim) // 16 * 8
    angle = torch.rand(slots, half, dtype=dtype, device=DEVICE) * 6.28
    cos, sin = angle.cos(), angle.sin()
    expected, found = [x.clone() for x in cache], []
    for b, n in enumerate(used.tolist()):
        place = n + torch.arange(rows, device=DEVICE)
        fresh, own = [x[b] for x in new], q[b]
        if half:
            fresh[0] = turned(fresh[0], cos, sin, place, case.interleaved)
            ordered = case.causal or case.window
            own = turned(own, cos, sin, place if ordered else place * 0 + n, case.interleaved)
        total = n
        if case.new:
            total += rows
            for x, written in zip(expected, fresh):
                x[b, n:total] = written
        first = 0 if start is None else int(start[b])
        alone = [x[b : b + 1, first:total] for x in expected]
        found.append([x.transpose(1, 2) for x in (own[None], *alone)])
    given: dict[str, Any] = {
        "cache_seqlens": used, "cache_leftpad": start, "causal": case.causal,
        "window_size": case.window or (-1, -1),
    }  # fmt: skip
    if case.new:
        given.update(zip("kv", new))
    if half:
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=case.interleaved)
    pools, tables = cache, [None, None]
    if case.page:
        pools, tables = [], []
        state = torch.random.get_rng_state()
        for x in cache:  # both in the same order
            torch.random.set_rng_state(state)
            pool, table = paged(x, case.page)
            pools.append(pool)
            tables.append(table)
    if case.chunk:
        o = fa3.flash_attn_with_kvcache(
            q, *pools, page_table=tables[0], attention_chunk=case.chunk, **given
        )
    else:
        o = fa2.flash_attn_with_kvcache(q, *pools, block_table=tables[0], **given)
    for x, whole, table in zip(pools, expected, tables):
        kept = x if table is None else unpaged(x, table, slots)
        torch.testing.assert_close(kept, whole)

    def results(dtype: Any) -> list[Any]:
        options = options_of(case, None)
        parts = [reference(*(x.to(dtype) for x in arrays), **options)[0] for arrays in found]
        return [torch.cat(parts)]

    compare([o.transpose(1, 2)], results(torch.float64), lambda: results(dtype), dtype)


def test_packed_queries_and_new_keys_of_fa3() -> None:
    """cu_seqlens_q and cu_seqlens_k_new: a chunk of a prompt, a decode and nothing at all."""
    counts = [5, 1, 0]
    cu = torch.tensor([0, 5, 6, 6], dtype=torch.int32)
    q = torch.randn(6, 4, 16, dtype=torch.float64)
    new = [torch.randn(6, 2, 16, dtype=torch.float64) for _ in "kv"]
    cache = [torch.randn(3, 12, 2, 16, dtype=torch.float64) for _ in "kv"]
    used = torch.tensor([3, 7, 2], dtype=torch.int32)
    angle = torch.rand(12, 8, dtype=torch.float64)
    pools, table = zip(*(paged(x, 4) for x in cache[:1])), None
    (pool,), (table,) = pools
    values = torch.zeros_like(pool).index_copy_(
        0, table.flatten().long(), cache[1].unflatten(1, (3, 4)).flatten(0, 1)
    )
    o, lse = fa3.flash_attn_with_kvcache(
        q, pool, values, *new, cache_seqlens=used, page_table=table, cu_seqlens_q=cu,
        cu_seqlens_k_new=cu, max_seqlen_q=5, causal=True, return_softmax_lse=True,
        rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=False,
    )  # fmt: skip
    assert lse.shape == (4, 6)
    for b, count in enumerate(counts):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        place = int(used[b]) + torch.arange(count)
        k = torch.cat([cache[0][b, : used[b]],
                       turned(new[0][rows], angle.cos(), angle.sin(), place, False)])  # fmt: skip
        v = torch.cat([cache[1][b, : used[b]], new[1][rows]])
        own = turned(q[rows], angle.cos(), angle.sin(), place, False)
        wanted = fa2.flash_attn_func(own[None], k[None], v[None], causal=True)
        torch.testing.assert_close(o[rows], wanted[0])


def test_packed_queries_over_a_block_table_and_num_splits() -> None:
    k, v = torch.randn(2, 3, 12, 2, 16, dtype=torch.float64)
    state = torch.random.get_rng_state()
    k_pool, table = paged(k, 4)
    torch.random.set_rng_state(state)
    v_pool, _ = paged(v, 4)
    q = torch.randn(6, 4, 16, dtype=torch.float64)
    cu_q, cu_k = torch.tensor([0, 2, 5, 6]), torch.tensor([0, 12, 15, 22])
    o, lse, s = fa2.flash_attn_varlen_func(
        q, k_pool, v_pool, cu_q, cu_k, 3, 12, causal=True, block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    assert s is None
    assert lse.shape == (4, 6)
    for b, length in enumerate(cu_k.diff().tolist()):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        wanted = fa2.flash_attn_func(q[None, rows], k[b : b + 1, :length], v[b : b + 1, :length],
                                     causal=True)  # fmt: skip
        torch.testing.assert_close(o[rows], wanted[0])
    newest, newest_lse = fa4.flash_attn_varlen_func(
        q, k_pool, v_pool, cu_seqlens_q=cu_q, seqused_k=cu_k.diff(), page_table=table, causal=True,
        return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close((newest, newest_lse), (o, lse))
    with pytest.raises(fulmen.ArgumentError, match="seqused_k"):
        fa4.flash_attn_varlen_func(q, k_pool, v_pool, cu_seqlens_q=cu_q, page_table=table)
    one = q[:3, None]
    lengths = torch.tensor([12, 3, 7], dtype=torch.int32)
    padded, _ = fa4.flash_attn_varlen_func(one, k_pool, v_pool, seqused_k=lengths, page_table=table)
    torch.testing.assert_close(padded, fa2.flash_attn_with_kvcache(
        one, k_pool, v_pool, cache_seqlens=lengths, block_table=table
    ))  # fmt: skip
    found = [
        fa2.flash_attn_with_kvcache(
            one, k_pool, v_pool, cache_seqlens=lengths, block_table=table, num_splits=n
        )
        for n in (0, 1, 3)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    whole = fa2.flash_attn_with_kvcache(one, k_pool, v_pool, block_table=table)
    torch.testing.assert_close(whole, fa2.flash_attn_func(one, k, v))


def test_u66_new_keys_of_entries_far_apart() -> None:
    """Entries 2^30 elements apart: those that the index names change, entry 0 does not."""
    memory = [torch.from_numpy(far(0)(np.zeros((5, 6, 1, 8), np.float16))) for _ in "kv"]
    new = torch.ones(4, 3, 1, 8, dtype=torch.float16)
    index = torch.tensor([1, 2, 3, 4])
    o = fa2.flash_attn_with_kvcache(
        new, *memory, new, new, cache_seqlens=torch.tensor([0, 1, 2, 3]), cache_batch_idx=index
    )
    assert o.isfinite().all()
    assert memory[0][0].eq(0).all()
    assert [int(x.sum()) for x in memory[1][1:]] == [24] * 4


def test_u73_a_length_beyond_its_pages() -> None:
    pool = torch.zeros(3, 16, 1, 8)
    table = torch.tensor([[2]], dtype=torch.int32)
    with pytest.raises(fulmen.ArgumentError, match="kv_lengths"):
        fulmen.attention_paged(pool[:1, :1], pool, pool, table, [17], layout="bshd")
    for pages in (table, None):  # flash-attention#2709; without a table an entry has 16 rows
        lengths = torch.tensor([17], dtype=torch.int32)
        cache = pool if pages is not None else pool[:1]
        with pytest.raises(fulmen.ArgumentError, match="kv_lengths"):
            fa2.flash_attn_with_kvcache(
                pool[:1, :1], cache, cache, cache_seqlens=lengths, block_table=pages
            )


def test_fa3_s_cache_batch_idx_chooses_rows_of_the_table() -> None:
    pool = torch.randn(5, 4, 2, 8)
    table = torch.tensor([[0, 1], [4, 2], [3, 3]], dtype=torch.int32)
    q, rows = torch.randn(2, 1, 4, 8), torch.tensor([1, 0], dtype=torch.int32)
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    o = fa3.flash_attn_with_kvcache(q, pool, pool, page_table=table, cache_batch_idx=rows, **given)
    wanted = fa3.flash_attn_with_kvcache(q, pool, pool, page_table=table[[1, 0]], **given)
    assert torch.equal(o, wanted)


def test_u99_new_keys_and_any_number_of_splits() -> None:
    found = []
    for splits in (0, 1, 2, 5):
        torch.manual_seed(4)
        k, v = torch.randn(2, 1, 452, 2, 16)
        q, *new = torch.randn(3, 1, 196, 2, 16)
        found.append(fa3.flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=256, causal=True, num_splits=splits
        ))  # fmt: skip
        torch.testing.assert_close(found[-1], fa2.flash_attn_func(q, k, v, causal=True))
    assert all(torch.equal(x, found[0]) for x in found)


def test_u100_a_context_that_grows_by_one_in_each_step() -> None:
    rows, heads, page = 150, 2, 4
    k, v = torch.randn(2, 1, rows, heads, 8, dtype=torch.float64)
    pools = torch.full((2, rows // page + 3, page, heads, 8), torch.nan, dtype=torch.float64)
    table = torch.randperm(rows // page + 3)[None].int()
    for length in range(rows):
        q = torch.randn(1, 1, heads, 8, dtype=torch.float64)
        o = fa2.flash_attn_with_kvcache(
            q, *pools, k[:, length, None], v[:, length, None], cache_seqlens=length,
            block_table=table,
        )  # fmt: skip
        wanted = fa2.flash_attn_func(q, k[:, : length + 1], v[:, : length + 1])
        torch.testing.assert_close(o, wanted)


def test_u97_what_does_not_fit_is_not_written() -> None:
    """A new key behind the last row of a full cache: nobody's memory changes."""
    pool = torch.zeros(5, 2, 1, 8, device=DEVICE)
    new = torch.ones(2, 1, 1, 8, device=DEVICE)
    table = torch.tensor([[1, 3], [0, 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([4, 3], device=DEVICE)
    given = (new, pool, pool.clone(), new, new)
    if DEVICE == "cpu":
        with pytest.raises(fulmen.ArgumentError, match="page_table has no page"):
            fa2.flash_attn_with_kvcache(*given, cache_seqlens=lengths, block_table=table)
        assert pool.sum() == 0
    else:
        fa2.flash_attn_with_kvcache(*given, cache_seqlens=lengths, block_table=table)
        assert pool.sum() == 8
        assert (pool[2, 1] == 1).all()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "new keys without lengths": ({"k": True, "v": True}, fulmen.ArgumentError, "cache_seqlens"),
    "new keys without values": ({"k": True, "cache_seqlens": 1}, fulmen.ArgumentError, "without v"),
    "rotary without new keys": (
        {"rotary_cos": True, "rotary_sin": True, "cache_seqlens": 1}, fulmen.ArgumentError,
        "rotary_cos is given without k",
    ),
    "half a rotary": ({"rotary_cos": True}, fulmen.ArgumentError, "without rotary_sin"),
    "two tables": (
        {"block_table": torch.zeros(1, 1).int(), "cache_batch_idx": torch.zeros(1).int()},
        fulmen.ArgumentError, "cache_batch_idx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    given, error, sentence = REFUSED[name]
    x = torch.zeros(1, 2, 1, 8)
    given = {key: x if value is True else value for key, value in given.items()}
    with pytest.raises(error, match=sentence):
        fa2.flash_attn_with_kvcache(x, x, x, **given)
    with pytest.raises(fulmen.UnsupportedError, match="qv"):
        fa3.flash_attn_with_kvcache(x, x, x, qv=x)
    offsets = torch.tensor([0, 2])
    with pytest.raises(fulmen.UnsupportedError, match="dropout_p"):
        fa2.flash_attn_varlen_func(
            x[0], x, x, offsets, offsets, dropout_p=0.5, block_table=torch.zeros(1, 1).int()
        )


# ---- flash_attn.layers.rotary ----


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(40, 6, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    offsets = torch.tensor([3, 30])
    found = flash_rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    place = torch.arange(5)
    wanted = torch.stack([turned(x[b], cos, sin, place + offsets[b], interleaved)
                          for b in range(2)])  # fmt: skip
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x) for y in (found, wanted)))
    cu = torch.tensor([0, 2, 10])
    packed = flash_rotary.apply_rotary_emb(x.detach().flatten(0, 1), cos, sin, interleaved,
                                           cu_seqlens=cu)  # fmt: skip
    flat = x.detach().flatten(0, 1)
    for rows in (slice(0, 2), slice(2, 10)):
        alone = turned(flat[rows], cos, sin, torch.arange(10)[: rows.stop - rows.start],
                       interleaved)  # fmt: skip
        torch.testing.assert_close(packed[rows], alone)
    own = x.detach().clone()
    assert flash_rotary.apply_rotary_emb(own, cos, sin, interleaved, inplace=True) is own
    with pytest.raises(fulmen.UnsupportedError, match="inplace"):
        flash_rotary.apply_rotary_emb(x, cos, sin, inplace=True)
    with pytest.raises(fulmen.ShapeError, match="sin has shape"):
        flash_rotary.apply_rotary_emb(own, angle.repeat(1, 2), angle, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_of_rotary_embeddings(interleaved: bool) -> None:
    module = flash_rotary.RotaryEmbedding(8, interleaved=interleaved)
    qkv = torch.randn(2, 6, 3, 2, 16)
    frequency = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.arange(9.0)[:, None] * frequency
    wanted = qkv.clone()
    for part, b in ((part, b) for part in range(2) for b in range(2)):
        wanted[b, :, part] = turned(qkv[b, :, part], angle.cos(), angle.sin(),
                                    2 + torch.arange(6), interleaved)  # fmt: skip
    q, kv = module(qkv[:, :, 0], qkv[:, :, 1:].clone(), seqlen_offset=2)
    torch.testing.assert_close(torch.cat([q[:, :, None], kv], 2), wanted)
    flat = module(qkv.flatten(2, 3).clone(), seqlen_offset=2, num_heads_q=2)
    torch.testing.assert_close(flat.unflatten(2, (3, 2)), wanted)
    assert module(qkv, seqlen_offset=2) is qkv
    torch.testing.assert_close(qkv, wanted)
    with pytest.raises(fulmen.UnsupportedError, match="scale_base"):
        flash_rotary.RotaryEmbedding(8, scale_base=512.0)
    with pytest.raises(fulmen.ArgumentError, match="max_seqlen"):
        module(qkv, seqlen_offset=torch.tensor([0, 1]))
