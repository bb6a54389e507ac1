# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks and block maps from Python: what they mean, gradients, plans, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.masks import blocks, documents, expression

LISTS = np.array([[0, -1, -1], [2, 0, 2], [1, 3, -1], [-1, -1, -1]], np.int32)


def problem(heads: int = 4, kv_heads: int = 2) -> list[Any]:
    rng = np.random.default_rng(2)
    shapes = ((heads, 200), (kv_heads, 230), (kv_heads, 230))
    return [rng.standard_normal((2, *shape, 8)) for shape in shapes]


def dense_lists(lists: Any, size: tuple[int, int], heads: int = 4) -> Any:
    """The boolean matrix of lists, by a loop."""
    lists = np.asarray(lists).reshape((1,) * (4 - np.ndim(lists)) + np.shape(lists))
    seen = np.zeros((2, heads, 200, 230), bool)
    for b, h, i in np.ndindex(2, heads, 200):
        row = lists[b % len(lists), h * lists.shape[1] // heads, i // size[0]]
        for block in row[row >= 0]:
            seen[b, h, i, block * size[1] : (block + 1) * size[1]] = True
    return seen


SHAPES = {"one": (1, 1), "kv_heads": (1, 2), "heads": (1, 4), "batch": (2, 1), "all": (2, 4)}


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
@pytest.mark.parametrize("axes", SHAPES)
def test_lists_are_a_boolean_mask(implementation: str, axes: str) -> None:
    q, k, v = problem()
    lists = np.random.default_rng(5).integers(-1, 2, (*SHAPES[axes], 4, 2))
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    found = fulmen.attention_forward(q, k, v, mask=blocks(lists, (64, 128)), **options)
    mask = dense_lists(lists, (64, 128))
    wanted = fulmen.attention_forward(q, k, v, mask=mask, **options)
    np.testing.assert_allclose(found.o, wanted.o, atol=1e-12)
    np.testing.assert_allclose(found.lse, wanted.lse, atol=1e-12)
    backward = [
        fulmen.attention_backward(q, q, k, v, x.o, x.stats, mask=m, **options)
        for x, m in ((found, blocks(lists, (64, 128))), (wanted, mask))
    ]
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(
            getattr(backward[0], name), getattr(backward[1], name), atol=1e-11
        )
    seen = fulmen.dense_mask(200, 230, causal=True, mask=blocks(lists, (64, 128)), batch=2, heads=4)
    np.testing.assert_array_equal(seen, mask & fulmen.dense_mask(200, 230, causal=True))


def test_lists_stand_beside_other_masks() -> None:
    q, k, v = problem()
    ids = np.arange(230) // 50
    both = (blocks(LISTS, 64), documents(ids[:200], ids), "i % 3 != 1")
    i, j = np.ogrid[:200, :230]
    seen = dense_lists(LISTS, (64, 64)) & (ids[i] == ids[j]) & (i % 3 != 1)
    np.testing.assert_allclose(
        fulmen.attention(q, k, v, mask=both), fulmen.attention(q, k, v, mask=seen), atol=1e-12
    )


def test_packed_lists_count_from_the_sequence() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((230, 4, 8)) for _ in range(3))
    offsets = np.array([0, 100, 100, 230])
    lists = np.stack([LISTS[:3], LISTS[1:], LISTS[[2, 0, 1]]])[:, None] % 3
    found = fulmen.attention_varlen(q, k, v, offsets, offsets, max_q=130, mask=blocks(lists, 64))
    for b, (first, last) in enumerate(zip(offsets, offsets[1:])):
        part = slice(first, last)
        one = [x[part].swapaxes(0, 1)[None] for x in (q, k, v)]
        rows = -(-(last - first) // 64)
        ids = np.where(lists[b, :, :rows] * 64 < last - first, lists[b, :, :rows], -1)
        wanted = fulmen.attention(*one, mask=blocks(ids, 64))
        np.testing.assert_allclose(found[part], wanted[0].swapaxes(0, 1), atol=1e-12)


def test_lists_of_a_plan_are_those_of_the_run() -> None:
    q, k, v = problem()
    plan = fulmen.plan(q, k, v, mask=blocks(LISTS, 64))
    for lists in (LISTS, LISTS[::-1].copy()):
        found = plan.forward(q, k, v, blocks=lists).o
        np.testing.assert_array_equal(found, fulmen.attention(q, k, v, mask=blocks(lists, 64)))


REFUSED: dict[str, tuple[Any, str]] = {
    "id": ([[0], [4], [0], [0]], r"blocks\[0, 0, 1, 0\] is 4, but there are 4 blocks of 64 keys; "
           r"allowed is -1, or 0 to 3"),
    "negative": ([[0], [-2], [0], [0]], "is -2, but there are 4 blocks"),
    "rows": ([[0]] * 3, "blocks has 3 lists a head.*up to 200 rows in blocks of 64 need 4"),
    "heads": (np.zeros((1, 3, 4, 1), int), "blocks has 3 heads.*those of k, 2, and those of q, 4"),
    "batch": (np.zeros((3, 1, 4, 1), int), r"blocks has shape \(3, 1, 4, 1\) where"),
    "dtype": (np.zeros((4, 1), np.float32), "blocks is float32; allowed is int32 or int64"),
    "rank": (np.zeros(4, int), "blocks has rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    lists, said = REFUSED[name]
    q, k, v = problem()
    with pytest.raises(fulmen.Error, match=said):
        fulmen.attention(q, k, v, mask=blocks(lists, 64))


def test_sizes() -> None:
    for size, said in ((32, "is 32; a multiple of 64"), (0, "is 0; a multiple"), ((64,), "two")):
        with pytest.raises(fulmen.ArgumentError, match=said):
            blocks(LISTS, size)
    with pytest.raises(fulmen.ArgumentError, match="two Blocks"):
        fulmen.attention(*problem(), mask=(blocks(LISTS, 64), blocks(LISTS, 64)))


def test_kernels_for_ampere_refuse_them() -> None:
    q, k, v = (x.astype(np.float16) for x in problem())
    for operation in ("forward", "backward"):
        with pytest.raises(fulmen.UnsupportedError, match="does not take lists of blocks"):
            fulmen.explain(
                q, k, v, mask=blocks(LISTS, 64), operation=operation, device_name="h200",
                implementation="sm80",
            )  # fmt: skip


def test_kernels_for_hopper_take_them() -> None:
    q, k, v = (np.zeros((1, 2, 300, 64), np.float16) for _ in range(3))
    lists = np.zeros((5, 2), np.int32)
    for operation in ("forward", "backward"):
        plan = fulmen.explain(
            q, k, v, mask=blocks(lists, 64), operation=operation, device_name="h200"
        )
        assert plan["implementation"] == "sm90"
        assert any(kernel["name"].startswith("list_tiles") for kernel in plan["kernels"])


def test_what_kernels_for_hopper_refuse() -> None:
    lists = np.zeros((5, 2), np.int32)
    wide = (np.zeros((1, 2, 300, 256), np.float16) for _ in range(3))
    with pytest.raises(fulmen.UnsupportedError, match="head dimensions up to 192"):
        fulmen.explain(
            *wide, mask=blocks(lists, 64), operation="backward", device_name="h200",
            implementation="sm90",
        )  # fmt: skip


def test_a_map_is_the_mask_by_blocks() -> None:
    mask = expression("doc[i] == doc[j] and j <= p", doc=np.repeat(np.arange(5), 60))
    seen = fulmen.dense_mask(300, 300, mask=mask)
    for exact in (False, True):
        found = fulmen.block_map(300, 300, size=(20, 30), exact=exact, mask=mask)
        assert found.size == (20, 30)
        kinds = found.kinds[0, 0]
        for row, key in np.ndindex(*kinds.shape):
            part = seen[row * 20 : row * 20 + 20, key * 30 : key * 30 + 30]
            wanted = 2 if part.all() else int(part.any())
            assert kinds[row, key] == wanted or (kinds[row, key] == 1 and not exact)
    assert found.density == (found.kinds > 0).mean()
    for rows, kinds in (
        (found.by_query(), found.kinds[0, 0]),
        (found.by_key(), found.kinds[0, 0].T),
    ):
        for n, row in enumerate(kinds):
            part = slice(rows.offsets[n], rows.offsets[n + 1])
            np.testing.assert_array_equal(rows.blocks[part], np.flatnonzero(row))
            np.testing.assert_array_equal(rows.kinds[part], row[row > 0])


@pytest.mark.parametrize(
    "text",
    ["doc[i] == doc[j] and j <= p", "(p - j) % 7 == 0", "doc[j] < 9", "wide[i] > wide[j] + 0.5",
     "both[i, j]", "abs(p - j) < 40 or doc[i] == 3"],
)  # fmt: skip
@pytest.mark.parametrize("size", [(2, 3), (3, 200), (300, 1)])
def test_boxes_of_many_blocks_say_what_each_says(text: str, size: tuple[int, int]) -> None:
    """Three levels of boxes on one side, two and one on the other; the last ones are not full."""
    rng = np.random.default_rng(11)
    known = {
        "doc": np.sort(rng.integers(0, 12, 299)), "wide": np.linspace(-1.0, 1.0, 299),
        "both": rng.random((299, 299)) < 0.9,
    }  # fmt: skip
    known["wide"][40] = np.nan
    mask = expression(text, **{name: x for name, x in known.items() if name in text})
    seen = fulmen.dense_mask(299, 251, mask=mask)
    for exact in (False, True):
        kinds = fulmen.block_map(299, 251, size=size, exact=exact, mask=mask).kinds[0, 0]
        for row, key in np.ndindex(*kinds.shape):
            part = seen[row * size[0] :, key * size[1] :][: size[0], : size[1]]
            wanted = 2 if part.all() else int(part.any())
            assert kinds[row, key] == wanted or (kinds[row, key] == 1 and not exact)


def test_a_map_makes_lists() -> None:
    q, k, v = problem()
    mask = "j <= p and (p - j < 50 or j < 3)"
    lists = fulmen.block_map(200, 230, size=64, mask=mask).lists()
    assert lists.dtype == np.int32
    found = fulmen.attention(q, k, v, mask=(mask, blocks(lists, 64)))
    np.testing.assert_allclose(found, fulmen.attention(q, k, v, mask=mask), atol=1e-12)


def test_maps_of_heads_lengths_and_nothing() -> None:
    width = np.array([10, 100])
    mask = expression("p - width[h] < j <= p", width=width)
    found = fulmen.block_map(128, 128, size=32, mask=mask, heads=2, kv_lengths=[128, 40], batch=2)
    assert found.kinds.shape == (2, 2, 4, 4)
    assert (found.kinds[1, :, :, 2:] == 0).all()
    empty = fulmen.block_map(0, 40)
    assert empty.kinds.shape == (1, 1, 0, 1)
    assert empty.density == 0
    assert empty.lists().shape == (1, 1, 0, 1)


def test_refusals_of_maps() -> None:
    with pytest.raises(fulmen.ArgumentError, match="size is 0"):
        fulmen.block_map(10, 10, size=0)
    with pytest.raises(fulmen.ShapeError, match="sq is -1"):
        fulmen.block_map(-1, 10)
    with pytest.raises(fulmen.ArgumentError, match="mask has s, but"):
        fulmen.block_map(10, 10, mask="s > 0")
