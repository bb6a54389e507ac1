# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests spread over several servers: each is a process, with a GPU of its own.

Every replica has the model and pages of its own. A request goes, when it arrives, to the replica
with the fewest tokens still to come; common beginnings are shared inside of each.
"""

from __future__ import annotations

import copy
import queue
import time
from collections import deque

import torch
import torch.multiprocessing as mp
from server import Request, Server


def serve(replica, model, device, sizes, inbox, outbox) -> None:
    """What a replica's process does: `inbox` brings a time to start at, requests, or None."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    model = model.to(device)
    server, numbers = Server(model, *sizes), {}
    while True:
        while not inbox.empty() or not (server.waiting or server.running):
            message = inbox.get()
            if message is None:
                return
            if isinstance(message, float):
                server = Server(model, *sizes)
                server.start = message
                continue
            number, request = message
            numbers[id(request)] = number
            server.submit(request)
        finished = [(numbers.pop(id(x)), x) for x in server.step()]
        if finished:
            outbox.put((replica, server.num_steps, server.num_preempted, finished))


class Replicas:
    """Stands for one server: `run`, `num_steps` and `num_preempted` are those of all."""

    def __init__(self, model, count: int, *sizes) -> None:
        context = mp.get_context("spawn")
        self.outbox = context.Queue()
        self.inboxes = [context.Queue() for _ in range(count)]
        model = copy.deepcopy(model).cpu()
        gpus = torch.cuda.device_count()
        devices = [f"cuda:{n % gpus}" if gpus else "cpu" for n in range(count)]
        self.processes = [
            context.Process(
                target=serve, args=(n, model, devices[n], sizes, inbox, self.outbox), daemon=True
            )  # none is waited for where this process fails
            for n, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def run(self, requests, advance=None) -> list[Request]:
        """As that of a server. The clock of `perf_counter` is one for all processes on Linux."""
        count = len(self.inboxes)
        self.start = time.perf_counter()
        for inbox in self.inboxes:
            inbox.put(self.start)
        coming = deque(sorted(enumerate(requests), key=lambda x: x[1].arrival))
        left, found, steps, put_back = [0] * count, {}, [0] * count, [0] * count
        while len(found) < len(requests):
            while coming and coming[0][1].arrival <= self.now():
                number, request = coming.popleft()
                replica = min(range(count), key=left.__getitem__)
                left[replica] += len(request.prompt) + request.most_new
                self.inboxes[replica].put((number, request))
            wait = min(1.0, max(coming[0][1].arrival - self.now(), 0.0) if coming else 1.0)
            try:
                replica, steps[replica], put_back[replica], finished = self.outbox.get(timeout=wait)
            except queue.Empty:
                self._check()
                continue
            for number, request in finished:
                left[replica] -= len(request.prompt) + request.most_new
                found[number] = request
            if advance is not None:
                advance([request for _, request in finished], self)
        self.num_steps, self.num_preempted = sum(steps), sum(put_back)
        return [found[number] for number in range(len(requests))]

    def _check(self) -> None:
        for replica, process in enumerate(self.processes):
            if process.exitcode is not None:
                raise RuntimeError(f"replica {replica} ended with {process.exitcode}")

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join()
