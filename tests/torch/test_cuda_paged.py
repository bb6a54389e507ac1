# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches in pages on an NVIDIA GPU: replays while requests come and go, streams, neighbours, sizes.

Skipped without one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import fulmen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
REQUESTS, TABLE = 9, 20  # pages of the longest request
REPLAYS = 1000


class Server:
    """Pools, tables and lengths of a captured call; a step gives them to other requests.

    Pages that no request has are NaN, and so are rows past a length; entries of a table past a
    request's last page are garbage.
    """

    def __init__(self, rows: int, seed: int, shares: bool = False) -> None:
        """With so many query rows at most; 1 unless they are packed. shares: a common prompt."""
        self.shares = shares
        self.draw = random.Random(seed)
        self.rows = rows
        count = REQUESTS * TABLE + 3
        self.memory = torch.randn(
            2, count, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16
        )
        self.k, self.v = self.memory.clone()
        self.table = torch.zeros(REQUESTS, TABLE, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32, device="cuda")
        self.cu_q = torch.zeros(REQUESTS + 1, dtype=torch.int32, device="cuda")
        self.shared = torch.zeros(1, dtype=torch.int32, device="cuda")
        total = REQUESTS * rows
        self.q = torch.randn(total, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def step(self) -> None:
        draw = self.draw
        free = list(range(self.k.shape[0]))
        draw.shuffle(free)
        table = torch.randint(-(2**31), 2**31 - 1, (REQUESTS, TABLE), dtype=torch.int64)
        lengths, counts = [], []
        seen = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        for b in range(REQUESTS):
            length = draw.choice(
                (0, 1, PAGE, PAGE + 1, TABLE * PAGE, draw.randint(1, TABLE * PAGE))
            )
            if self.shares:
                length = length and max(length, draw.choice((2, 9)) * PAGE)
            used = -(-length // PAGE)
            pages = [free.pop() for _ in range(used)]
            table[b, :used] = torch.tensor(pages, dtype=torch.int64)
            for number, page in enumerate(pages):
                seen[page, : length - number * PAGE] = True
            lengths.append(length)
            counts.append(draw.randint(0, min(self.rows, length)))
        if self.shares:
            begun = [b for b in range(REQUESTS) if lengths[b]]
            common = min((lengths[b] // PAGE for b in begun), default=0)
            common = draw.randint(0, common)
            table[begun, :common] = table[begun[:1], :common]
            self.shared.fill_(draw.randint(max(common * PAGE - 3, 0), common * PAGE))
        seen = seen.cuda()[..., None, None]
        for pool, memory in ((self.k, self.memory[0]), (self.v, self.memory[1])):
            pool.copy_(torch.where(seen, memory, torch.nan))
        self.table.copy_(table.to(torch.int32))
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.cu_q[1:] = torch.tensor(counts).cumsum(0).int()
        self.q.normal_()

    def call(self) -> Any:
        packed: dict[str, Any] = {}
        q = self.q
        if self.rows > 1:
            packed = {"cu_q": self.cu_q, "max_q": self.rows, "layout": "shd"}
        else:
            q, packed = q[:, None], {"layout": "bshd"}
        if self.shares:
            packed.update(kv_shared=self.shared, implementation="sm80")  # however few keys
        return fulmen.attention_paged(
            q, self.k, self.v, self.table, self.lengths, causal=True, return_lse=True, **packed
        )

    def truth(self, b: int) -> Any:
        """o of request b in float64, (row, head, dim); its rows among those of q."""
        length = int(self.lengths[b])
        rows = slice(b, b + 1) if self.rows == 1 else slice(*self.cu_q[b : b + 2].tolist())
        pages = self.table[b, : -(-length // PAGE)].long()
        q = self.q[rows].double().transpose(0, 1)
        k, v = (
            x[pages].flatten(0, 1)[:length].double().transpose(0, 1).repeat_interleave(
                HEADS // KV_HEADS, 0
            )
            for x in (self.k, self.v)
        )  # fmt: skip
        s = q @ k.mT * DIM**-0.5
        hidden = torch.ones_like(s, dtype=torch.bool).triu(length - q.shape[1] + 1)
        p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1).nan_to_num(0)
        return (p @ v).transpose(0, 1), rows


@pytest.mark.parametrize(("rows", "shares"), [(1, False), (40, False), (1, True)])
def test_replays_follow_requests_that_come_and_go(rows: int, shares: bool) -> None:
    server = Server(rows, rows, shares)
    server.step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        server.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        o, lse = server.call()
    fulmen.device_faults(0)
    for number in range(REPLAYS):
        server.step()
        o.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        again, lse_again = server.call()
        assert torch.equal(o, again)
        assert torch.equal(lse, lse_again)
        if number % 20 == 0:
            for b in range(REQUESTS):
                wanted, at = server.truth(b)
                found = (o[:, 0] if rows == 1 else o)[at].double()
                assert (abs(found - wanted) <= 0.01 + 0.01 * abs(wanted)).all(), (number, b)
    assert fulmen.device_faults(0) == 0


def test_two_streams_at_once_share_nothing() -> None:
    servers = [Server(1, 3), Server(40, 4)]
    for server in servers:
        server.step()
    wanted = [server.call() for server in servers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in servers]
    for _ in range(50):
        found = []
        for server, stream in zip(servers, streams):
            with torch.cuda.stream(stream):
                found.append(server.call())
        torch.cuda.synchronize()
        for ours, other in zip(found, wanted):
            assert all(torch.equal(x, y) for x, y in zip(ours, other))


@pytest.mark.parametrize(("keys", "rows"), [(300, 1), (5000, 1), (5000, 9)])
def test_with_batch_invariant_a_request_has_the_bits_of_itself_alone(keys: int, rows: int) -> None:
    pages = -(-keys // PAGE)
    k, v = torch.randn(2, 40 * pages, PAGE, KV_HEADS, DIM, device="cuda").bfloat16()
    table = torch.randperm(40 * pages, device="cuda").view(40, pages).int()
    lengths = torch.randint(1, keys + 1, (40,), device="cuda", dtype=torch.int32)
    lengths[7] = keys
    q = torch.randn(40, rows, HEADS, DIM, device="cuda").bfloat16()
    alone = None
    for chosen in ([7], [7, 3], [1, 2, 7], list(range(40)), list(range(39, -1, -1))):
        o = fulmen.attention_paged(
            q[chosen], k, v, table[chosen], lengths[chosen], layout="bshd", batch_invariant=True
        )[chosen.index(7)]
        alone = o if alone is None else alone
        assert torch.equal(o, alone)


def test_a_million_keys() -> None:
    keys = 1 << 20
    k, v = torch.randn(2, keys // PAGE, PAGE, 1, DIM, device="cuda").bfloat16()
    table = torch.randperm(keys // PAGE, device="cuda").int()[None]
    q = 4 * torch.randn(1, 1, 4, DIM, device="cuda").bfloat16()
    lengths = torch.tensor([keys - 5], dtype=torch.int32, device="cuda")
    o = fulmen.attention_paged(q, k, v, table, lengths, layout="bshd")
    rows, values = (x[table[0].long()].flatten(0, 1)[: keys - 5, 0].double() for x in (k, v))
    wanted = torch.softmax(q[0, 0].double() @ rows.T * DIM**-0.5, -1) @ values
    assert (abs(o[0, 0].double() - wanted) <= 0.01 + 0.01 * abs(wanted)).all()


@pytest.mark.parametrize("rows", [1, 100])
def test_pages_beyond_32_bits_of_elements(rows: int) -> None:
    """The last of 2^32 + elements, in a pool of which a few pages are ever written."""
    pages = 2**32 // (PAGE * KV_HEADS * DIM) + 8
    pools = [
        torch.empty(pages, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    table = torch.tensor([[pages - 1, 3, pages - 5, pages // 2, 0, 1, 2]], device="cuda").int()
    keys = 7 * PAGE - 4
    for pool in pools:
        pool[table[0].long()] = torch.randn(7, PAGE, KV_HEADS, DIM, device="cuda").bfloat16()
    q = torch.randn(1, rows, HEADS, DIM, device="cuda").bfloat16()
    lengths = torch.tensor([keys], dtype=torch.int32, device="cuda")
    o = fulmen.attention_paged(q, *pools, table, lengths, layout="bshd")
    k, v = (x[table[0].long()].flatten(0, 1)[None, :keys] for x in pools)
    wanted = fulmen.attention(q, k, v, layout="bshd", implementation="simt")
    torch.testing.assert_close(o, wanted, atol=0.01, rtol=0.01)
    new = torch.ones(2, 1, 1, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    fulmen.append_kv(*pools, *new, (table, lengths), layout="bshd")
    assert (pools[0][2, keys % PAGE] == 1).all()
    slot = torch.tensor([[(pages - 1) * PAGE + 3]], device="cuda")
    fulmen.append_kv(*pools, *new, slot, layout="bshd")
    assert (pools[1][pages - 1, 3] == 1).all()
