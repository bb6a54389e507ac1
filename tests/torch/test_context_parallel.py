# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.distributed: one sequence over ranks that are threads or Gloo processes, against one call.

Every schedule, layout and mask in float64, whose errors are far below what a wrong pair would make;
float32 and bfloat16 by the error rule; what is refused, and what a rank that is gone does.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from long_run import IS_FULL, full

import fulmen
from fulmen import distributed as fd
from fulmen.distributed.parts import Band, Segment, pairs_of, parts_of
from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.pairwise import pairwise
from fulmen.lab.cases.visible import Options
from fulmen.lab.cases.visible import Problem as OracleProblem

LENGTH = 77  # no multiple of anything
IDS = [row // 13 for row in range(LENGTH)]


def masks() -> dict[str, dict[str, Any]]:
    """What a call asks for, by name."""
    slopes, table, sinks = torch.rand(3, 4, dtype=torch.float64)
    documents = fulmen.masks.documents(IDS)
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": 20},
        "window of both sides": {"window": (9, 5)},
        "prefix": {"causal": True, "mask": fulmen.masks.prefix(11)},
        "prefix, window": {"causal": True, "mask": fulmen.masks.prefix(30), "window": (25, None)},
        "documents": {"causal": True, "mask": documents},
        "documents and chunks": {"mask": (documents, fulmen.masks.chunks(10))},
        "alibi": {"causal": True, "alibi_slopes": slopes},
        "alibi and a score": {"alibi_slopes": slopes.expand(2, 4), "score": "s * 0.5 + h * 0.1"},
        "sinks": {"causal": True, "sinks": sinks, "softcap": 5.0},
        "texts": {
            "score": fulmen.score("s + table[h] * (p - j) / kv_len", table=table),
            "mask": "j <= i or (i + j) % 7 == hk",
        },
        "dropout": {"causal": True, "dropout_p": 0.3, "rng": (5, 6), "mask": documents},
        "dropout and more": {
            "score": fulmen.score("s + table[h] * (p - j) / kv_len", table=table),
            "alibi_slopes": slopes, "window": (30, 8), "sinks": sinks, "dropout_p": 0.5,
            "rng": torch.tensor([7, 8]),
        },
    }  # fmt: skip


def differentiable(options: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The options with leaves of their own for what has a gradient, and these."""
    made, leaves = dict(options), []
    if "sinks" in made:
        made["sinks"] = made["sinks"].clone().requires_grad_()
        leaves.append(made["sinks"])
    if isinstance(made.get("score"), fulmen.Score):
        table = made["score"].captures["table"].clone().requires_grad_()
        made["score"] = fulmen.score(made["score"].text, table=table)
        leaves.append(table)
    return made, leaves


def tensors(length: int, dtype: Any = torch.float64) -> list[Any]:
    """q, k, v and do of the whole sequence."""
    shapes = ((4, 16), (2, 16), (2, 24), (4, 24))
    return [torch.randn(2, heads, length, dim, dtype=dtype) for heads, dim in shapes]


def of_ranks(size: int, options: dict[str, Any], whole: list[Any], **how: Any) -> list[Any]:
    """(o, dq, dk, dv) of the whole sequence and the gradients of the leaves, summed over ranks."""

    def rank(transport: Any) -> Any:
        cp = fd.context_parallel(transport, length=whole[0].shape[2], **how)
        mine = [cp.shard(x, 2).detach().requires_grad_() for x in whole[:3]]
        made, leaves = differentiable(options)
        o = cp.attention(*mine, **made)
        found = torch.autograd.grad(o, [*mine, *leaves], cp.shard(whole[3], 2))
        return [cp.unshard(x.detach(), 2) for x in (o, *found[:3])], found[3:]

    results = fd.in_process(size, rank, timeout=30)
    for other, _ in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0][0], other))
    return [*results[0][0], *(sum(column) for column in zip(*(x for _, x in results)))]


ROWS = pairwise(
    {
        "size": [2, 3, 4, 8],
        "layout": ["zigzag", "contiguous", "balanced"],
        "schedule": ["gather", "ring", "heads", "gather by heads", "ring by heads"],
        "mask": list(masks()),
    },
    lambda row: (
        not (
            (row["schedule"] == "heads" and row["size"] not in (2, 4))
            or ("by" in row["schedule"] and row["size"] not in (4, 8))
            or ("heads" in row["schedule"] and "dropout" in row["mask"])
        )
    ),
    seed=27,
)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory of torch holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CHOSEN = ROWS if IS_FULL else ROWS[::2]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: " ".join(map(str, row.values())))
@pytest.mark.usefixtures("poisoned")
def test_ranks_together_are_one_call(row: dict[str, Any]) -> None:
    options, size = masks()[row["mask"]], row["size"]
    length = LENGTH
    layout = row["layout"]
    if layout == "balanced":  # chunks of other sizes than the library's 128, dealt by hand
        bounds = [0, 3, 11, 12, 30, 31, 33, 47, 60, 61, 62, 70, 75, 77]
        owners = [chunk * 5 % size for chunk in range(len(bounds) - 1)]
        segments = [[Segment(a, b - a) for a, b, owner in zip(bounds, bounds[1:], owners)
                     if owner == rank] for rank in range(size)]  # fmt: skip
        layout = fd.Shards("by hand", tuple(tuple(each) for each in segments))
    schedule, _, by = row["schedule"].partition(" by ")
    whole = tensors(length)
    made, leaves = differentiable(options)
    own = [x.clone().requires_grad_() for x in whole[:3]]
    o = fulmen.attention(*own, **made)
    expected = [o, *torch.autograd.grad(o, [*own, *leaves], whole[3])]
    how = {"layout": layout, "schedule": schedule, "heads": 2 if by else 1}
    found = of_ranks(size, options, whole, **how)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["gather", "ring"])
def test_the_error_rule_holds(schedule: str, dtype: str) -> None:
    whole = tensors(LENGTH, getattr(torch, dtype))
    whole[0][:, :, ::7] *= 30  # rows with large scores
    q, k, v, do = (x.double().numpy() for x in whole)
    options = Options(causal=True, window=(40, 0))
    oracle = consult(OracleProblem(q, k, v, options, do), dtype)
    found = of_ranks(3, {"causal": True, "window": (40, 0)}, whole, schedule=schedule)
    for name, x in zip(("o", "dq", "dk", "dv"), found):
        bits = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
        verdict = judge(name, x.view(torch.uint8).numpy().view(bits), oracle)
        assert verdict.passed, f"{name}: {verdict.message}"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_gather_gives_the_bits_of_one_call(layout: str) -> None:
    """On the CPU, where segments begin at multiples of its tiles."""
    whole = tensors(1024, torch.float32)
    expected = fulmen.attention(*whole[:3], causal=True)
    found = of_ranks(4, {"causal": True}, whole, schedule="gather", layout=layout)
    assert torch.equal(found[0], expected)


def test_scores_of_a_million_keep_their_sums() -> None:
    """m and l stay apart, where lse has no digits left for l."""
    whole = tensors(LENGTH, torch.float32)
    whole[0] *= 3e5
    own = [x.clone().requires_grad_() for x in whole[:3]]
    expected = torch.autograd.grad(fulmen.attention(*own, causal=True), own, whole[3])
    found = of_ranks(3, {"causal": True}, whole, schedule="ring")
    for x, y in zip(found[1:], expected):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max()))


@pytest.mark.parametrize("seed", range(40))
def test_parts_have_each_visible_pair_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(8, 60))
    cuts = np.unique([0, *rng.integers(1, length, 6), length])
    every = [Segment(int(a), int(b - a)) for a, b in zip(cuts, cuts[1:])]
    rows, keys = ([x for x in every if rng.random() < 0.6] or every[:1] for _ in range(2))
    rows = keys if seed % 3 == 0 else rows
    left = None if rng.random() < 0.4 else int(rng.integers(0, 20))
    causal = bool(rng.random() < 0.6)
    prefix = int(rng.integers(0, length)) if causal and rng.random() < 0.4 else 0
    right = None if causal or rng.random() < 0.4 else int(rng.integers(0, 20))
    band = Band(left, 0 if causal else right, prefix, right)
    window = (left, right)
    mask = fulmen.masks.prefix(prefix) if prefix else None
    dense = fulmen.dense_mask(length, length, causal=causal, window=window, mask=mask)
    at, of = (np.concatenate([np.arange(a, a + n) for a, n in side]) for side in (rows, keys))
    count = np.zeros((len(at), len(of)), int)
    for part in parts_of(rows, keys, band, join=bool(seed % 2)):
        n, m = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
        seen = fulmen.dense_mask(n, m, **dict(part.options))
        assert pairs_of(part) == seen.sum()
        count[slice(*part.rows), slice(*part.keys)] += seen
    np.testing.assert_array_equal(count, dense[at][:, of])


def test_balanced_shards_balance_documents() -> None:
    ids = np.repeat(np.arange(4), [128, 256, 640, 1024])
    mask = fulmen.masks.documents(ids)
    shards = fd.balanced(2048, 4, chunk=128, causal=True, mask=mask)
    dense = fulmen.dense_mask(2048, 2048, causal=True, mask=mask).sum(1)
    work = [sum(int(dense[a : a + n].sum()) for a, n in each) for each in shards.segments]
    assert [shards.rows(rank) for rank in range(4)] == [512] * 4
    straight = dense.reshape(4, 512).sum(1)
    assert max(work) / np.mean(work) < 1.2 < straight.max() / straight.mean()
    shards.check()


def test_shard_and_unshard_are_differentiable_and_inverse() -> None:
    x = torch.randn(2, LENGTH, 3, dtype=torch.float64, requires_grad=True)

    def rank(transport: Any) -> Any:
        cp = fd.context_parallel(transport)
        own = x.detach().clone().requires_grad_()
        mine = cp.shard(own)
        assert torch.equal(cp.positions(), mine.new_tensor(cp.positions().tolist()).long())
        assert torch.equal(own[:, cp.positions()], mine)
        whole = cp.unshard(mine * 2)
        (found,) = torch.autograd.grad(whole.pow(2).sum(), own)
        return whole.detach(), found

    results = fd.in_process(3, rank)
    assert all(torch.equal(whole, 2 * x.detach()) for whole, _ in results)
    torch.testing.assert_close(sum(found for _, found in results), 8 * x.detach())


def test_checkpointing_gives_the_same() -> None:
    whole = tensors(32, torch.float32)

    def rank(transport: Any) -> Any:
        cp = fd.context_parallel(transport, length=32)
        mine = [cp.shard(x, 2).detach().requires_grad_() for x in whole[:3]]

        def layer(*arrays: Any) -> Any:
            return cp.attention(*(x * 1.5 for x in arrays), causal=True) + 1

        plain = layer(*mine)
        again = torch.utils.checkpoint.checkpoint(layer, *mine, use_reentrant=False)
        do = cp.shard(whole[3], 2)
        pairs = zip(torch.autograd.grad(plain, mine, do), torch.autograd.grad(again, mine, do))
        return torch.equal(plain, again) and all(torch.equal(x, y) for x, y in pairs)

    assert all(fd.in_process(2, rank))


def test_bshd_and_lse_with_its_gradient() -> None:
    whole = tensors(LENGTH)
    own = [x.clone().requires_grad_() for x in whole[:3]]
    o, lse = fulmen.attention(*own, causal=True, return_lse=True)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), own, (whole[3], dlse))

    def rank(transport: Any) -> Any:
        how = {"schedule": "ring", "heads": 2} if transport.size == 4 else {"schedule": "gather"}
        cp = fd.context_parallel(transport, length=LENGTH, **how)
        mine = [cp.shard(x, 2).transpose(1, 2).detach().requires_grad_() for x in whole[:3]]
        part, sums = cp.attention(*mine, causal=True, layout="bshd", return_lse=True)
        given = cp.shard(whole[3], 2).transpose(1, 2), cp.shard(dlse, 2)
        found = torch.autograd.grad((part, sums), mine, given)
        whole_o, *grads = (cp.unshard(x.detach(), 1).transpose(1, 2) for x in (part, *found))
        return whole_o, cp.unshard(sums.detach(), 2), *grads

    for size in (2, 4):
        for found in fd.in_process(size, rank):
            for x, y in zip(found, (o, lse, *expected)):
                torch.testing.assert_close(x, y.detach())


REFUSED = {
    "dropout_p": ({"dropout_p": 0.1}, fulmen.ArgumentError, "the same on every rank"),
    "bias": ({"bias": torch.zeros(LENGTH, LENGTH)}, fulmen.UnsupportedError, "score="),
    "matrix": (
        {"mask": np.ones((LENGTH, LENGTH), bool)}, fulmen.UnsupportedError, "all pairs",
    ),
    "ids of a rank": (
        {"mask": fulmen.masks.documents([0] * 9)}, fulmen.ShapeError, "whole sequence",
    ),
    "kv_lengths": ({"kv_lengths": [3, 4]}, fulmen.UnsupportedError, "documents"),
    "prefix alone": ({"mask": fulmen.masks.prefix(3)}, fulmen.ArgumentError, "causal"),
    "right": ({"causal": True, "window": (3, 4)}, fulmen.ArgumentError, "right side"),
    "layout": ({"layout": "shd"}, fulmen.ArgumentError, "bhsd"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_all_refuse(name: str) -> None:
    options, error, words = REFUSED[name]
    whole = tensors(LENGTH)

    def rank(transport: Any) -> Any:
        cp = fd.context_parallel(transport, length=LENGTH)
        given = options if transport.rank else {}
        with pytest.raises(fulmen.Error) as caught:
            cp.attention(*(cp.shard(x, 2) for x in whole[:3]), **given)
        return caught.value

    other, own = fd.in_process(2, rank, timeout=20)
    assert isinstance(own, error)
    assert isinstance(other, fulmen.ArgumentError)
    assert "rank 1 of 2 refuses the call" in str(other)
    assert all(words in str(x) for x in (own, other))


def test_shapes_heads_and_words_are_refused() -> None:
    whole = tensors(LENGTH)

    def rank(transport: Any) -> None:
        with pytest.raises(fulmen.ArgumentError, match="schedule is 'rings'"):
            fd.context_parallel(transport, schedule="rings")
        with pytest.raises(fulmen.ArgumentError, match="divisor of the 3 ranks"):
            fd.context_parallel(transport, heads=2)
        with pytest.raises(fulmen.ArgumentError, match="length of the sequence"):
            fd.context_parallel(transport).attention(*whole[:3])
        cp = fd.context_parallel(transport, length=LENGTH)
        with pytest.raises(fulmen.ShapeError, match=rf"q has shape .* of {LENGTH} is expected"):
            cp.attention(*whole[:3])
        by_heads = fd.context_parallel(transport, length=LENGTH, schedule="heads")
        with pytest.raises(fulmen.ArgumentError, match="do not go over 3 ranks by heads"):
            by_heads.attention(*(cp.shard(x, 2) for x in whole[:3]))
        with pytest.raises(fulmen.ShapeError, match="rows along dim"):
            cp.unshard(whole[0], 2)

    fd.in_process(3, rank, timeout=20)
    for make, words in (
        (lambda: fd.zigzag(2, 3), "at least one row"),
        (lambda: fd.balanced(512, 2, chunk=100), "multiple of 128"),
        (lambda: fd.balanced(512, 2, chunk=512), "chunk=256"),
        (lambda: fd.Shards("x", ((Segment(0, 4),), (Segment(5, 4),))).check(), "position 5"),
    ):
        with pytest.raises(fulmen.ArgumentError, match=words):
            make()


def test_ranks_that_call_differently_all_hear_it() -> None:
    whole = tensors(LENGTH)

    def rank(transport: Any) -> str:
        cp = fd.context_parallel(transport, length=LENGTH)
        with pytest.raises(fulmen.ArgumentError, match="the ranks call differently") as caught:
            cp.attention(*(cp.shard(x, 2) for x in whole[:3]), causal=True, window=transport.rank)
        return str(caught.value)

    one, other = fd.in_process(2, rank, timeout=20)
    assert one == other
    assert "'window': '1'" in one


def test_a_rank_that_dies_or_is_late_ends_the_others_waits() -> None:
    whole = tensors(LENGTH)
    heard = []

    def rank(transport: Any) -> None:
        cp = fd.context_parallel(transport, length=LENGTH, schedule="ring")
        if transport.rank == 1:
            raise KeyError("gone")
        with pytest.raises(fulmen.DeviceError, match="no result of the call is valid") as caught:
            cp.attention(*(cp.shard(x, 2) for x in whole[:3]))
        heard.append(str(caught.value))

    with pytest.raises(KeyError, match="gone"):
        fd.in_process(3, rank, timeout=20)
    assert len(heard) == 2
    assert all("rank 1 ended with KeyError" in x for x in heard)

    def late(transport: Any) -> None:
        cp = fd.context_parallel(transport, length=LENGTH)
        if transport.rank == 0:
            begin = time.monotonic()
            with pytest.raises(fulmen.DeviceError, match=r"within 0.2 seconds"):
                cp.attention(*(cp.shard(x, 2) for x in whole[:3]))
            assert time.monotonic() - begin < 10

    fd.in_process(2, late, timeout=0.2)


def test_explain_counts_steps_bytes_and_balance() -> None:
    def of(size: int, layout: str, schedule: str, **options: Any) -> Any:
        transport = fd.in_process(1, lambda x: x)[0]
        transport.size = size
        cp = fd.context_parallel(transport, layout=layout, schedule=schedule)
        return cp.explain((1, 64, 16384 * size, 128), (1, 8, 16384 * size, 128), **options)

    zigzag = of(8, "zigzag", "ring", causal=True)
    assert zigzag.balance == pytest.approx(1, abs=1e-3)
    assert of(8, "contiguous", "ring", causal=True).balance < 0.6
    assert zigzag.steps == 8
    assert sum(zigzag.pairs) == 131072 * 131073 // 2
    assert zigzag.sent[0] == 7 * 2 * 8 * 16384 * 256
    assert of(8, "contiguous", "ring", causal=True, window=100).steps == 2
    alone = of(1, "contiguous", "gather", causal=True)
    assert alone.rate[0] > zigzag.rate[0] > 0.75 * alone.rate[0]
    assert "schedule ring" in str(zigzag)


def _process(rank: int, size: int, port: int, has_death: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = tensors(LENGTH)
    own = [x.clone().requires_grad_() for x in whole[:3]]
    options = {"causal": True, "window": 30}
    o = fulmen.attention(*own, **options)
    expected = [o, *torch.autograd.grad(o, own, whole[3])]
    schedules = [("gather", 1), ("ring", 1)]
    schedules += [("ring", 2)] if size % 2 == 0 else []
    schedules += [("heads", 1)] if size in (2, 4) else []  # there are four heads
    for (schedule, heads), layout in itertools.product(schedules, ("zigzag", "contiguous")):
        cp = fd.context_parallel(layout=layout, schedule=schedule, heads=heads, timeout=30)
        mine = [cp.shard(x, 2).detach().requires_grad_() for x in whole[:3]]
        part = cp.attention(*mine, **options)
        found = [part, *torch.autograd.grad(part, mine, cp.shard(whole[3], 2))]
        for x, y in zip(found, expected):
            torch.testing.assert_close(cp.unshard(x.detach(), 2), y.detach())
    if has_death:
        if rank == size - 1:
            os._exit(0)
        cp = fd.context_parallel(length=LENGTH, timeout=5)
        with pytest.raises(fulmen.DeviceError, match="no result of the call is valid"):
            cp.attention(*(cp.shard(x, 2) for x in whole[:3]))
        os._exit(0)
    torch.distributed.destroy_process_group()


def gloo(size: int, has_death: bool) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    torch.multiprocessing.start_processes(
        _process, (size, port, has_death), nprocs=size, start_method="spawn"
    )


def test_two_gloo_processes() -> None:
    gloo(2, has_death=True)


@full
@pytest.mark.parametrize("size", [3, 4, 8])
def test_more_gloo_processes(size: int) -> None:
    gloo(size, has_death=False)
