# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.attention_paged on NumPy arrays: every way to name pages, layouts, plans, refusals.

Numbers are judged by the named cases (tag caches) and by the fuzzer of caches; here the same call
is written in several ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen

RNG = np.random.default_rng(5)
PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 9, 4, 2, 8
LENGTHS = [11, 0, 5]
TABLE = [[7, 2, 8], [-1, 99, -1], [0, 3, 10**6]]


def pools(dtype: Any = np.float32) -> tuple[Any, Any]:
    """(page, kv_head, row, dim)."""
    k, v = RNG.standard_normal((2, PAGES, KV_HEADS, PAGE, DIM)).astype(dtype)
    return k, v


def queries(rows: int = 2) -> Any:
    return RNG.standard_normal((3, HEADS, rows, DIM)).astype(np.float32)


def contiguous(pool: Any) -> Any:
    """The keys of each request in order, (3, kv_head, 12, dim); zeros behind."""
    found = np.zeros((3, KV_HEADS, 12, DIM), pool.dtype)
    for b, length in enumerate(LENGTHS):
        for j in range(length):
            found[b, :, j] = pool[TABLE[b][j // PAGE], :, j % PAGE]
    return found


def expected(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return fulmen.attention(
        q, contiguous(k), contiguous(v), kv_lengths=LENGTHS, implementation="scalar", **options
    )


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_table_a_list_of_pages_and_lists_of_python(causal: bool) -> None:
    q, (k, v) = queries(), pools()
    wanted = expected(q, k, v, causal=causal)
    close(fulmen.attention_paged(q, k, v, TABLE, LENGTHS, causal=causal), wanted)
    table = np.array(TABLE, np.int32)
    close(fulmen.attention_paged(q, k, v, table, np.array(LENGTHS), causal=causal), wanted)
    csr = np.array([0, 3, 4, 6]), np.array([7, 2, 8, 999, 0, 3])
    close(fulmen.attention_paged(q, k, v, csr, LENGTHS, max_kv=12, causal=causal), wanted)
    o, lse = fulmen.attention_paged(q, k, v, TABLE, LENGTHS, causal=causal, return_lse=True)
    close(o, wanted)
    assert np.isneginf(lse[1]).all()
    assert (o[1] == 0).all()


def test_contiguous_caches_with_and_without_an_index() -> None:
    q, (k, v) = queries(), pools()
    lengths = [4, 1, 2]
    found = fulmen.attention_paged(q, k, v, None, lengths, batch_index=[8, 0, 3], causal=True)
    wanted = fulmen.attention(
        q, k[[8, 0, 3]], v[[8, 0, 3]], kv_lengths=lengths, causal=True, implementation="scalar"
    )
    close(found, wanted)
    close(fulmen.attention_paged(q, k[:3], v[:3], None, lengths),
          fulmen.attention(q, k[:3], v[:3], kv_lengths=lengths))  # fmt: skip
    padded = fulmen.attention_paged(q, k[:3], v[:3], None, [4, 4, 4], kv_start=[1, 0, 2])
    for b, start in enumerate((1, 0, 2)):
        close(padded[b], fulmen.attention(q[b : b + 1], k[b : b + 1, :, start:],
                                          v[b : b + 1, :, start:])[0])  # fmt: skip


@pytest.mark.parametrize("said", [6, [6], [6, 0, 6], np.array([400]), np.int64(0)])
def test_keys_that_requests_share_are_said_and_change_nothing(said: Any) -> None:
    q, (k, v) = queries(), pools()
    table, lengths = np.array([[7, 2, 8], [-1, 99, 0], [7, 2, 1]]), np.array([9, 0, 8])
    wanted = fulmen.attention_paged(q, k, v, table, lengths, causal=True, return_lse=True)
    found = fulmen.attention_paged(
        q, k, v, table, lengths, causal=True, return_lse=True, kv_shared=said
    )
    assert all(np.array_equal(x, y) for x, y in zip(found, wanted))
    given = {"page_table": table, "kv_lengths": lengths, "causal": True}
    plan = fulmen.plan(q, k, v, need=(), kv_shared=np.array([0]), **given)
    run = plan.forward(q, k, v, kv_shared=np.array([6]))
    assert np.array_equal(run.o, wanted[0])


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "hsd", "shd"])
def test_layouts(layout: str) -> None:
    q, (k, v) = queries(), pools()
    wanted = expected(q, k, v, causal=True)
    if layout.endswith("hsd"):
        pages = k, v
    else:
        pages, q = (k.swapaxes(1, 2), v.swapaxes(1, 2)), q.swapaxes(1, 2)
        wanted = wanted.swapaxes(1, 2)
    table, lengths = TABLE, LENGTHS
    if len(layout) == 3:
        q, wanted, table, lengths = q[0], wanted[0], TABLE[:1], LENGTHS[:1]
    found = fulmen.attention_paged(q, *pages, table, lengths, causal=True, layout=layout)
    close(found, wanted)


def test_packed_queries_are_rows_first_as_their_pages_are() -> None:
    q, (k, v) = queries(3), pools()
    pages = k.swapaxes(1, 2), v.swapaxes(1, 2)
    counts = [3, 1, 2]
    rows = np.concatenate([q[b, :, -n:].swapaxes(0, 1) for b, n in enumerate(counts)])
    found = fulmen.attention_paged(
        rows, *pages, TABLE, LENGTHS, cu_q=[0, 3, 4, 6], causal=True, softcap=2.0
    )
    first = 0
    for b, n in enumerate(counts):
        wanted = expected(q[:, :, -n:], k, v, causal=True, softcap=2.0)
        close(found[first : first + n], wanted[b].swapaxes(0, 1))
        first += n


def test_a_plan_of_packed_queries_runs() -> None:
    rows = RNG.standard_normal((6, HEADS, DIM)).astype(np.float32)
    pages = [x.swapaxes(1, 2) for x in pools()]
    given = {"cu_q": np.array([0, 3, 4, 6]), "kv_lengths": np.array(LENGTHS), "causal": True}
    plan = fulmen.plan(rows, *pages, need=(), layout="shd", page_table=np.array(TABLE), **given)
    wanted = fulmen.attention_paged(
        rows, *pages, TABLE, given.pop("kv_lengths"), implementation="scalar", **given
    )
    close(plan.forward(rows, *pages).o, wanted)


def test_drafts_and_positions() -> None:
    q, (k, v) = queries(3), pools()
    chain = fulmen.masks.tree([[0b001, 0b011, 0b111]] * 3)
    wanted = expected(q, k, v, causal=True)
    close(fulmen.attention_paged(q, k, v, TABLE, LENGTHS, mask=chain), wanted)
    own = [[n - 3 + i for i in range(3)] for n in LENGTHS]
    close(fulmen.attention_paged(q, k, v, TABLE, LENGTHS, positions=own, causal=True), wanted)
    found = fulmen.attention_paged(q, k, v, TABLE, LENGTHS, positions=[[0] * 3] * 3, causal=True)
    close(found[0], np.repeat(v[7, :, :1], HEADS // KV_HEADS, 0).repeat(3, 1))  # the first key


def test_words_of_a_tree_may_be_unsigned_or_have_bit_63() -> None:
    assert fulmen.masks.tree([2**63 + 1]).options["tree"].tolist() == [1 - 2**63]
    words = fulmen.masks.tree(np.array([1, 2], np.uint64)).options["tree"]
    assert words.dtype == np.int64


def test_a_plan_takes_new_tables_and_lengths() -> None:
    q, (k, v) = queries(), pools()
    table, lengths = np.array(TABLE), np.array(LENGTHS)
    plan = fulmen.plan(q, k, v, need=(), page_table=table, kv_lengths=lengths, causal=True)
    close(plan.forward(q, k, v).o, expected(q, k, v, causal=True))
    other = np.array([[1, 5, 6], [4, 0, 0], [8, 8, 0]])
    found = plan.forward(q, k, v, page_table=other, kv_lengths=np.array([9, 3, 8]))
    close(found.o, fulmen.attention_paged(q, k, v, other, [9, 3, 8], causal=True))


def test_explain_says_who_takes_pages() -> None:
    q, (k, v) = queries(), pools()
    said = fulmen.explain(q, k, v, page_table=np.array(TABLE), kv_lengths=np.array(LENGTHS))
    assert said["implementation"] in ("scalar", "tiled")
    assert said["operation"] == "forward"


def test_a_problem_of_pages_is_planned_ahead() -> None:
    shapes = {"q": (3, HEADS, 1, DIM), "k": (PAGES, KV_HEADS, PAGE, DIM)}
    fulmen.warmup([{
        **shapes, "v": shapes["k"], "page_table": np.array(TABLE), "kv_lengths": np.array(LENGTHS),
        "backend": "cpu",
    }])  # fmt: skip


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no lengths": ({"kv_lengths": None}, fulmen.ArgumentError, "kv_lengths is None"),
    "two tables": ({"batch_index": [0, 1, 2]}, fulmen.ArgumentError, "batch_index are both given"),
    "three lists": (
        {"page_table": ([0], [1], [2])}, fulmen.ArgumentError, "page_table is a tuple of 3",
    ),
    "packed without table": (
        {"page_table": None, "cu_q": [0, 1, 2, 3]}, fulmen.ArgumentError, "without a table",
    ),
    "index of two axes": (
        {"page_table": None, "batch_index": [[0], [1], [2]]}, fulmen.DTypeError, "batch_index",
    ),
    "list of pages without a bound": (
        {"page_table": ([0, 3, 3, 5], [7, 2, 8, 0, 3])}, fulmen.Error, "max_kv",
    ),
    "fractions": ({"page_table": np.zeros((3, 3))}, fulmen.DTypeError, "page_table"),
    "rows of the table": ({"page_table": [[1, 2, 3]] * 2}, fulmen.ShapeError, "page_table"),
    "longer than its pages": ({"kv_lengths": [13, 0, 5]}, fulmen.ArgumentError, "kv_lengths"),
    "no such page": (
        {"page_table": [[7, 2, 9], [0] * 3, [0] * 3]}, fulmen.ArgumentError, "page_table",
    ),
    "start behind the end": ({"kv_start": [12, 0, 0]}, fulmen.ArgumentError, "kv_start"),
    "pages that differ": (
        {"page_table": [[7, 2, 8], [-1] * 3, [6, 3, 3]], "kv_shared": 8}, fulmen.ArgumentError,
        "kv_shared says that request 2 has the first",
    ),
    "fewer than none": ({"kv_shared": [-1]}, fulmen.ArgumentError, "kv_shared.0. is -1"),
    "said by two": ({"kv_shared": [1, 2]}, fulmen.ShapeError, "kv_shared"),
    "shared fractions": ({"kv_shared": [0.5]}, fulmen.DTypeError, "kv_shared"),
    "words of 32 bits": (
        {"mask": fulmen.masks.tree(np.zeros((3, 2), np.int32))}, fulmen.DTypeError, "tree",
    ),
    "unknown word": ({"block_table": [[0]]}, TypeError, "page_table"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_said_and_nothing_written(name: str) -> None:
    changes, error, sentence = REFUSALS[name]
    q, (k, v) = queries(), pools()
    out = np.full_like(q, np.nan)
    given = {"page_table": TABLE, "kv_lengths": LENGTHS, **changes}
    table, lengths = given.pop("page_table"), given.pop("kv_lengths")
    with pytest.raises(error, match=sentence):
        fulmen.attention_paged(q, k, v, table, lengths, out=out, **given)
    assert np.isnan(out).all()


def test_axes_of_pools_are_named() -> None:
    q, (k, v) = queries(), pools()
    with pytest.raises(fulmen.ShapeError, match="k has 3 axes"):
        fulmen.attention_paged(q, k[0], v, TABLE, LENGTHS)
    with pytest.raises(fulmen.ShapeError, match="v"):
        fulmen.attention_paged(q, k, v[:5], TABLE, LENGTHS)
    with pytest.raises(fulmen.ShapeError, match="q has 3 axes"):
        fulmen.attention_paged(q[0], k, v, TABLE, LENGTHS)


def test_more_than_64_drafts_are_refused() -> None:
    q, (k, v) = queries(65), pools()
    with pytest.raises(fulmen.ArgumentError, match="64"):
        fulmen.attention_paged(
            q, k, v, TABLE, LENGTHS, mask=fulmen.masks.tree(np.zeros((3, 65), np.int64))
        )


@pytest.mark.parametrize("said", ["page_table", "kv_start", "positions", "tree"])
def test_there_is_no_backward_pass(said: str) -> None:
    x = RNG.standard_normal((2, 2, 4, 8))
    options: dict[str, Any] = {
        "page_table": {"page_table": [[0], [1]], "kv_lengths": [4, 4]},
        "kv_start": {"kv_start": [1, 0]},
        "positions": {"positions": [[0, 1, 2, 3]] * 2},
        "tree": {"mask": fulmen.masks.tree(np.zeros((2, 4), np.int64))},
    }[said]
    o, lse = fulmen.attention(x, x, x, return_lse=True, **options)
    with pytest.raises(fulmen.UnsupportedError, match=said):
        fulmen.attention_backward(o, x, x, x, o, lse, **options)
    with pytest.raises(fulmen.UnsupportedError, match=said):
        fulmen.plan(x, x, x, **options)


def test_dense_mask_draws_them() -> None:
    drawn = fulmen.dense_mask(2, 5, kv_start=[2], causal=True)
    assert drawn.astype(int).tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    drawn = fulmen.dense_mask(2, 4, positions=[3, 0], causal=True)
    assert drawn.astype(int).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    drawn = fulmen.dense_mask(2, 4, mask=fulmen.masks.tree([0b01, 0b10]))
    assert drawn.astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]
