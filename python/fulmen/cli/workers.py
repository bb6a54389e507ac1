# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes that take one task after the other; a process that dies fails its task alone.

Called by verify. multiprocessing.Pool loses the tasks of a process that dies without a word, and an
executor of concurrent.futures ends at the first death.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

LOOK_SECONDS = 1.0  # how often stalled processes are looked for


class Death(NamedTuple):
    """What comes in place of a result when the process of a task ended before it."""

    reason: str


class Last(NamedTuple):
    """A result after which its process is of no use: a fault of a GPU stays with a process."""

    result: Any


class Worker:
    """One process and what it is at."""

    def __init__(self, run: Callable[[Any], Any], start: Callable[[], None]) -> None:
        """A process that calls start once and run for each task."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, run, start), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends with the process
        self.task: Any = None
        self.since = 0.0

    def give(self, task: Any) -> None:
        """The next task."""
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def result(self) -> Any:
        """The result of its task, or its Death."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return Death(f"the process ended {ended}")

    def end(self) -> None:
        """Kills it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, run: Callable[[Any], Any], start: Callable[[], None]) -> None:
    start()
    while True:
        try:
            task = pipe.recv()
        except EOFError:  # nothing more to do
            return
        pipe.send(run(task))


class Waiting:
    """Tasks in order; each has `bytes` of memory that all of them share while it runs."""

    def __init__(self, tasks: Iterable[Any], room: float) -> None:
        """room: bytes that there are for those that run together."""
        self.tasks = list(tasks)
        self.room = room
        self.running = 0

    def take(self) -> Any:
        """The first whose memory is left, or None; one too large for the room runs alone."""
        for index, task in enumerate(self.tasks):
            if not task.bytes or task.bytes <= self.room or not self.running:
                self.room -= task.bytes
                self.running += bool(task.bytes)
                return self.tasks.pop(index)
        return None

    def end(self, task: Any) -> None:
        """A task that was taken has given its memory back."""
        self.room += task.bytes
        self.running -= bool(task.bytes)

    def put_first(self, tasks: Iterable[Any]) -> None:
        """More to do, before all others."""
        self.tasks[:0] = tasks


def run_all(
    run: Callable[[Any], Any],
    next_task: Callable[[], Any],
    jobs: int,
    *,
    start: Callable[[int], None],
    stalled_seconds: float,
    until: float = math.inf,
) -> Iterator[tuple[Any, Any]]:
    """Each task and its result, Last or Death, as they come.

    Args:
        run: what a process does with a task; picklable, as are tasks and results.
        next_task: the next one to begin, or None while there is none: more may follow when a result
            has been seen.
        jobs: processes at once.
        start: what a process does first; given how many there were before it.
        stalled_seconds: a task that takes longer is ended with its process.
        until: of time.monotonic: when all that is left is given up.
    """
    workers: list[Worker] = []
    before = itertools.count()
    try:
        while len(workers) < jobs and (task := next_task()) is not None:
            workers.append(Worker(run, partial(start, next(before))))
            workers[-1].give(task)
        while workers and time.monotonic() < until:
            for worker, result in _finished(workers, stalled_seconds):
                task = worker.task
                yield task, result
                workers.remove(worker)
                following = next_task()
                is_over = isinstance(result, (Death, Last))
                if following is None or is_over:
                    worker.end()
                if following is not None:
                    fresh = Worker(run, partial(start, next(before))) if is_over else worker
                    workers.append(fresh)
                    workers[-1].give(following)
    finally:
        for worker in workers:
            worker.end()


def _finished(workers: list[Worker], stalled_seconds: float) -> list[tuple[Worker, Any]]:
    ready = wait([worker.pipe for worker in workers], LOOK_SECONDS)
    done = [(worker, worker.result()) for worker in workers if worker.pipe in ready]
    now = time.monotonic()
    for worker in workers:
        if worker.pipe not in ready and now - worker.since > stalled_seconds:
            done.append((worker, Death(f"no end after {stalled_seconds:.0f} s")))
    return done
