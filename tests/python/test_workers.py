# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes of `fulmen verify`: what comes back, also from those that die or never end."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from functools import partial
from typing import Any, Callable, NamedTuple

from fulmen.cli import verify
from fulmen.cli.workers import Death, Last, Waiting, run_all


def outcomes(run: Callable[[Any], Any], tasks: list[Any], stalled: float = math.inf,
             until: float = math.inf) -> Any:  # fmt: skip
    left = deque(tasks)
    next_task = lambda: left.popleft() if left else None  # noqa: E731
    found = run_all(run, next_task, 2, start=abs, stalled_seconds=stalled, until=until)
    return sorted(found)


def test_results_come_with_their_tasks() -> None:
    assert outcomes(math.factorial, [3, 5, 4]) == [(3, 6), (4, 24), (5, 120)]


def test_a_process_that_dies_fails_its_task_alone() -> None:
    found = outcomes(signal.raise_signal, [0, int(signal.SIGSEGV), 0, 0])
    assert found[:3] == [(0, None)] * 3
    assert found[3] == (int(signal.SIGSEGV), Death("the process ended by SIGSEGV"))


def own_process(task: int) -> Last:
    return Last(os.getpid())


def test_no_task_follows_a_last_result_in_its_process() -> None:
    found = outcomes(own_process, [1, 2, 3, 4])
    assert len({last.result for _, last in found}) == 4


def test_a_task_that_never_ends_is_ended() -> None:
    assert outcomes(time.sleep, [3600], 0.2) == [(3600, Death("no end after 0 s"))]


def test_what_is_left_at_the_end_of_the_time_is_given_up() -> None:
    begun = time.monotonic()
    assert outcomes(time.sleep, [3600, 3600], until=begun + 0.5) == []
    assert time.monotonic() - begun < 60


class Sized(NamedTuple):
    number: int
    bytes: int


def test_tasks_that_run_together_have_room() -> None:
    tasks = [Sized(number, number * 7 % 5 * 3) for number in range(40)]
    waiting = Waiting(tasks, 20)
    running: list[Sized] = []
    seen = []
    while (task := waiting.take()) or running:
        if task is None or len(running) == 6:
            waiting.end(running.pop(0))
        if task is not None:
            running.append(task)
            seen.append(task)
        assert sum(each.bytes for each in running) <= 20
    assert sorted(seen) == tasks
    assert seen[:2] == tasks[:2]


def test_a_task_that_is_too_large_for_the_room_runs_alone() -> None:
    waiting = Waiting([Sized(0, 9), Sized(1, 30), Sized(2, 8), Sized(3, 0)], 10)
    first = waiting.take()
    assert first == Sized(0, 9)
    assert waiting.take() == Sized(3, 0)
    assert waiting.take() is None  # 30 never fit, 8 do not now
    waiting.end(first)
    large = waiting.take()
    assert large == Sized(1, 30)
    assert waiting.take() is None
    waiting.end(large)
    assert waiting.take() == Sized(2, 8)


def test_tasks_without_memory_never_wait() -> None:
    waiting = Waiting([Sized(0, 30), Sized(1, 1), Sized(2, 0)], 10)
    assert [waiting.take(), waiting.take(), waiting.take()] == [Sized(0, 30), Sized(2, 0), None]
    waiting.put_first([Sized(3, 0)])
    assert waiting.take() == Sized(3, 0)


def test_processes_are_dealt_out_over_gpus() -> None:
    tasks = iter(["CUDA_VISIBLE_DEVICES"] * 2)
    found = run_all(
        os.getenv,
        lambda: next(tasks, None),
        2,
        start=partial(verify._start, 2, ["3", "5"]),
        stalled_seconds=60,
    )
    assert sorted(result for _, result in found) == ["3", "5"]
