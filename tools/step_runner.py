# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs named steps, three at a time where none needs another, and stops at the first failure.

A step is a function that calls `Runner.run` for its commands. What a command prints goes to
build/logs/STEP.log; with `show` also to the terminal, as it comes (test runners end with a line
that others read). On failure the end of the log is printed with the command and the step's name.

A step's cost is the CPU time of its commands: what else the machine does changes it little. A step
that costs more than its row of the budget fails.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

AT_A_TIME = 3  # on two cores: while one step links or starts, the others compute
LINES_OF_LOG_ON_FAILURE = 80


class StepError(Exception):
    """A command of a step exited with another code than 0, or a check of it said no."""


@dataclass(frozen=True)
class Step:
    name: str
    says: str  # what it shows, in a few words
    action: Callable[[Runner], None]
    after: tuple[str, ...] = ()  # steps whose results it needs


@dataclass
class Runner:
    root: Path
    logs: Path
    log: TextIO = field(default=sys.stdout)
    cpu_seconds: float = 0
    stopped: bool = False
    _running: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        show: bool = False,
    ) -> str:
        """Runs a command and returns what it printed, standard error included."""
        words = [str(word) for word in command]
        self.log.write(f"$ {shlex.join(words)}\n")
        self.log.flush()
        process = subprocess.Popen(
            words, cwd=cwd or self.root, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
        with self._lock:
            self._running.add(process.pid)
        if self.stopped:
            self.stop()
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            self.log.write(line)
            if show:
                print(line, end="", flush=True)
        if self._wait(process) != 0:
            raise StepError(f"exit code {process.returncode}: {shlex.join(words)}")
        return "".join(lines)

    def _wait(self, process: subprocess.Popen[str]) -> int:
        """The exit code; adds what the process and its descendants computed."""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._lock:
            self._running.discard(process.pid)
            self.cpu_seconds += used.ru_utime + used.ru_stime
        return process.returncode

    def stop(self) -> None:
        """Ends the commands that run, since another step has failed."""
        self.stopped = True
        with self._lock:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)

    def say(self, line: str) -> None:
        """A result worth a line on the terminal."""
        self.log.write(line + "\n")
        print(f"    {line}", flush=True)


@dataclass
class Times:
    wall: float
    cpu: float


class Schedule:
    """The steps of one run: which wait, which run, what the finished ones took."""

    def __init__(self, steps: Sequence[Step], root: Path) -> None:
        self.steps = list(steps)
        self.waiting = list(steps)
        self.root = root
        self.logs = root / "build" / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.times: dict[str, Times] = {}
        self.failed: Step | None = None
        self.running: dict[str, Runner] = {}
        self.changed = threading.Condition()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(AT_A_TIME)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stop_all()
            raise

    def _work(self) -> None:
        while (step := self._next()) is not None:
            self._perform(step)
            with self.changed:
                self.changed.notify_all()

    def _next(self) -> Step | None:
        """The first step whose needs are met, once there is one; None at the end."""
        with self.changed:
            while self.waiting and self.failed is None:
                unfinished = {step.name for step in self.steps} - self.times.keys()
                for step in self.waiting:
                    if not unfinished & set(step.after):
                        self.waiting.remove(step)
                        self.running[step.name] = Runner(self.root, self.logs)
                        begun = len(self.steps) - len(self.waiting)
                        print(f"[{begun}/{len(self.steps)}] {step.name}: {step.says}", flush=True)
                        return step
                self.changed.wait()
            return None

    def _perform(self, step: Step) -> None:
        runner = self.running[step.name]
        started = time.monotonic()
        path = self.logs / f"{step.name}.log"
        reason = ""
        with path.open("w", encoding="utf-8") as runner.log:
            try:
                step.action(runner)
            except StepError as failure:
                reason = str(failure)
            except Exception:
                reason = traceback.format_exc()
        if reason:
            self._fail(step, path, reason)
        with self.changed:
            self.times[step.name] = Times(time.monotonic() - started, runner.cpu_seconds)
            del self.running[step.name]

    def _fail(self, step: Step, log: Path, reason: str) -> None:
        with self.changed:
            if self.failed is not None:  # stopped, or too late to matter
                return
            self.failed = step
        self._stop_all()
        _explain(step, reason, log)

    def _stop_all(self) -> None:
        with self.changed:
            self.waiting.clear()
            for runner in self.running.values():
                runner.stop()


def run_all(
    title: str, steps: Sequence[Step], root: Path, budget: Mapping[str, float] | None = None,
    new_budget: Path | None = None,
) -> int:  # fmt: skip
    """Runs the steps; returns the exit code of the whole. budget: seconds of CPU, step by step;
    new_budget: the file that gets what the steps took and a quarter more."""
    begin = time.monotonic()
    schedule = Schedule(steps, root)
    schedule.run()
    if schedule.failed is not None:
        return 1
    in_order = {step.name: schedule.times[step.name] for step in steps}
    if new_budget is not None:
        write_budget(new_budget, {name: spent.cpu for name, spent in in_order.items()})
    return _summary(title, in_order, time.monotonic() - begin, budget or {})


def read_budget(path: Path) -> dict[str, float]:
    """'STEP SECONDS' on each line, after lines of comment."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[0]: float(row[1]) for row in rows if row and row[0] != "#"}


def write_budget(path: Path, cpu_seconds: Mapping[str, float]) -> None:
    """Rows of these steps, the others as they were."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name = line.split(" ")[0]
        changed = name in cpu_seconds
        lines.append(f"{name} {math.ceil(1.25 * cpu_seconds[name]) + 2}" if changed else line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _explain(step: Step, reason: str, log: Path) -> None:
    lines = log.read_text(encoding="utf-8").splitlines()
    print("\n".join(lines[-LINES_OF_LOG_ON_FAILURE:]))
    print(f"\nFAILED in step '{step.name}' ({step.says})\n  {reason}\n  whole log: {log}")


def _summary(
    title: str, times: Mapping[str, Times], total: float, budget: Mapping[str, float]
) -> int:
    print(f"\n{title}: every step passed\n  {'step':<12}{'seconds':>9}{'of CPU':>9}{'budget':>9}")
    for name, spent in times.items():
        allowed = f"{budget[name]:9.0f}" if name in budget else ""
        print(f"  {name:<12}{spent.wall:9.1f}{spent.cpu:9.1f}{allowed}")
    cpu = sum(spent.cpu for spent in times.values())
    print(f"  {'all':<12}{total:9.1f}{cpu:9.1f}  ({int(total) // 60} min {int(total) % 60} s)")
    over = [name for name, spent in times.items() if spent.cpu > budget.get(name, spent.cpu)]
    for name in over:
        print(f"FAILED: step '{name}' took {times[name].cpu:.0f} seconds of CPU; its budget is "
              f"{budget[name]:.0f}")  # fmt: skip
    return 1 if over else 0
