# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: each step takes the next tokens of every running request, old and new.

A step has room for so many tokens: one for each request that is generating, the rest for chunks of
prompts. Requests come and go between steps; one that finds no page waits, and if nothing else
helps the youngest gives its pages back and starts over later.

An invariant server gives a request the bits that it would have alone, in every dtype: a step always
has the same number of rows, so that a matrix product is the same one for each row; a prompt is
computed in chunks that begin and end where they would alone, and so is shared; what was generated
is computed one token at a time again; attention is asked for bits that no neighbour changes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from model import DIM, KV_HEADS, LAYERS, Batch, Decoder
from paging import NoPageError, Pages

CHUNK = 64  # tokens of a prompt at a time, of an invariant server: a multiple of its pages


@dataclass
class Request:
    prompt: list[int]
    most_new: int
    arrival: float = 0.0  # seconds on the server's clock
    tokens: list[int] = field(default_factory=list)  # prompt and what was generated
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0  # tokens whose keys and values are in pages
    num_shared: int = 0  # of these, tokens that another request had brought there
    times: list[float] = field(default_factory=list)  # when each new token came

    def next_rows(self) -> int:
        """Rows that are computed at once where bits must be those of the request alone."""
        if self.num_cached >= len(self.prompt):
            return 1
        return min(CHUNK - self.num_cached % CHUNK, len(self.prompt) - self.num_cached)

    @property
    def new(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.new) >= self.most_new


class Server:
    def __init__(self, model: Decoder, num_pages=256, page_size=16, most_requests=32,
                 most_tokens=256, dtype=torch.float32, invariant=False):  # fmt: skip
        if invariant and (CHUNK % page_size or most_tokens < max(CHUNK, most_requests)):
            raise ValueError(f"an invariant server has chunks of {CHUNK} tokens, whole pages")
        self.invariant = invariant
        self.model, self.most_requests, self.most_tokens = model, most_requests, most_tokens
        self.device = model.tokens.weight.device
        shape = (LAYERS, num_pages, page_size, KV_HEADS, DIM)
        self.k_pages, self.v_pages = (torch.zeros(shape, dtype=dtype, device=self.device)
                                      for _ in range(2))  # fmt: skip
        self.pages = Pages(num_pages, page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = self.num_preempted = 0
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def submit(self, request: Request) -> None:
        most = len(self.pages.users) * self.pages.page_size
        if not request.prompt or len(request.prompt) + request.most_new > most:
            raise ValueError(
                f"a request has {len(request.prompt)} + {request.most_new} tokens; 1 to {most} fit"
            )
        request.tokens = list(request.prompt)
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Runs one batch; the requests that it finished."""
        chosen = self._choose()
        if not chosen:
            return []
        batch = self._batch(chosen)
        logits = self.model.step(batch, self.k_pages, self.v_pages, self.invariant)
        best = logits.argmax(-1).tolist()
        self.num_steps += 1
        for (request, count), token in zip(chosen, best):
            request.num_cached += count
            known = min(
                request.num_cached, len(request.prompt if self.invariant else request.tokens)
            )
            self.pages.learn(request.tokens, request.pages, known)
            if request.num_cached == len(request.tokens):
                request.tokens.append(token)
                request.times.append(self.now())
        finished = [request for request in self.running if request.done]
        for request in finished:
            self._leave(request)
        return finished

    def run(self, requests, advance=None) -> list[Request]:
        """Serves requests to their ends, each from its arrival on; `advance(finished, server)`."""
        coming = deque(sorted(requests, key=lambda x: x.arrival))
        found: list[Request] = []
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= self.now():
                self.submit(coming.popleft())
            if not self.waiting and not self.running:
                time.sleep(max(coming[0].arrival - self.now(), 0))
                continue
            finished = self.step()
            found += finished
            if advance is not None:
                advance(finished, self)
        return found

    def _choose(self) -> list[tuple[Request, int]]:
        """Running requests and how many of their tokens this step takes."""
        chosen: dict[int, int] = {}
        room = self.most_tokens
        for request in list(self.running):  # those that generate have one token each: they go first
            if request in self.running and len(request.tokens) - request.num_cached == 1:
                room -= self._grant(request, min(room, 1), chosen)
        for request in list(self.running):
            if request in self.running and id(request) not in chosen:
                room -= self._grant(request, room, chosen)
        while self.waiting and len(self.running) < self.most_requests and room > 0:
            request = self.waiting[0]
            request.pages = self.pages.shared(request.tokens, CHUNK if self.invariant else 1)
            request.num_cached = len(request.pages) * self.pages.page_size
            request.num_shared = request.num_cached
            self.running.append(self.waiting.popleft())
            granted = self._grant(request, room, chosen, may_preempt=False)
            if granted == 0:
                self._leave(request)
                self.waiting.appendleft(request)
                break
            room -= granted
        return [(x, chosen[id(x)]) for x in self.running if chosen.get(id(x))]

    def _grant(self, request: Request, room: int, chosen: dict[int, int], may_preempt=True) -> int:
        """Up to `room` next tokens of a request, for which pages are there; how many."""
        wanted = min(len(request.tokens) - request.num_cached, room)
        if self.invariant:  # all of its next rows, or none
            wanted = request.next_rows() if request.next_rows() <= room else 0
        size = self.pages.page_size
        while wanted > 0 and len(request.pages) * size < request.num_cached + wanted:
            try:
                request.pages.append(self.pages.take())
            except NoPageError:
                youngest = self.running[-1]
                if may_preempt and youngest is not request and id(youngest) not in chosen:
                    self._preempt(youngest)
                    continue
                wanted = 0 if self.invariant else len(request.pages) * size - request.num_cached
        if wanted > 0:
            chosen[id(request)] = wanted
        elif may_preempt and room > 0 and not chosen and request is self.running[-1]:
            self._preempt(request)  # nobody can go on: the youngest makes room
        return max(wanted, 0)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages)
        request.pages, request.num_cached = [], 0

    def _batch(self, chosen: list[tuple[Request, int]]) -> Batch:
        size = self.pages.page_size
        tokens, positions, slots, lengths, cu_q = [], [], [], [], [0]
        for request, count in chosen:
            rows = range(request.num_cached, request.num_cached + count)
            tokens += request.tokens[rows.start : rows.stop]
            positions += rows
            slots += [request.pages[i // size] * size + i % size for i in rows]
            lengths.append(rows.stop)
            cu_q.append(len(tokens))
        width = max(len(request.pages) for request, _ in chosen)
        if self.invariant:  # as many rows, requests and pages as there may be, in every step
            width = len(self.pages.users)
            idle = self.most_requests - len(chosen)
            rows = self.most_tokens - len(tokens)
            tokens, positions = tokens + [0] * rows, positions + [0] * rows
            slots, lengths, cu_q = (
                slots + [-1] * rows,
                lengths + [0] * idle,
                cu_q + cu_q[-1:] * idle,
            )
        table = [request.pages + [-1] * (width - len(request.pages)) for request, _ in chosen]
        table += [[-1] * width] * (len(cu_q) - 1 - len(table))

        def made(x, dtype=torch.int32):
            return torch.tensor(x, dtype=dtype, device=self.device)

        last = [end - 1 for end in cu_q[1:]]
        return Batch(
            made(tokens, torch.int64), made(positions, torch.int64), made(slots, torch.int64),
            made(cu_q), made(table), made(lengths), made(last, torch.int64),
        )  # fmt: skip
