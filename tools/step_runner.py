# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs named steps one after the other, times them, and stops at the first that fails.

A step is a function that calls `Runner.run` for its commands. What a command prints goes to
build/logs/STEP.log; with `show` also to the terminal, as it comes (test runners end with a line
that others read). On failure the end of the log is printed with the command and the step's name.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

LINES_OF_LOG_ON_FAILURE = 80


class StepError(Exception):
    """A command of a step exited with another code than 0, or a check of it said no."""


@dataclass(frozen=True)
class Step:
    name: str
    says: str  # what it shows, in a few words
    action: Callable[[Runner], None]


@dataclass
class Runner:
    root: Path
    logs: Path
    log: TextIO = field(default=sys.stdout)

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
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            self.log.write(line)
            if show:
                print(line, end="", flush=True)
        if process.wait() != 0:
            raise StepError(f"exit code {process.returncode}: {shlex.join(words)}")
        return "".join(lines)

    def say(self, line: str) -> None:
        """A result worth a line on the terminal."""
        self.log.write(line + "\n")
        print(f"    {line}", flush=True)


def run_all(title: str, steps: Sequence[Step], root: Path) -> int:
    """Runs the steps; returns the exit code of the whole."""
    logs = root / "build" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    times: list[tuple[str, float, float]] = []
    begin = time.monotonic()
    for number, step in enumerate(steps, start=1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.says}", flush=True)
        started, cpu = time.monotonic(), _cpu_seconds()
        path = logs / f"{step.name}.log"
        try:
            with path.open("w", encoding="utf-8") as log:
                step.action(Runner(root, logs, log))
        except StepError as failure:
            _explain(step, failure, path)
            return 1
        times.append((step.name, time.monotonic() - started, _cpu_seconds() - cpu))
    _summary(title, times, time.monotonic() - begin)
    return 0


def _explain(step: Step, failure: StepError, log: Path) -> None:
    lines = log.read_text(encoding="utf-8").splitlines()
    print("\n".join(lines[-LINES_OF_LOG_ON_FAILURE:]))
    print(f"\nFAILED in step '{step.name}' ({step.says})\n  {failure}\n  whole log: {log}")


def _cpu_seconds() -> float:
    """What all commands so far have computed: the measure that a busy machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _summary(title: str, times: Sequence[tuple[str, float, float]], total: float) -> None:
    print(f"\n{title}: every step passed\n  {'step':<12}{'seconds':>9}{'of CPU':>9}")
    for name, wall, cpu in times:
        print(f"  {name:<12}{wall:9.1f}{cpu:9.1f}")
    cpu = sum(step_cpu for _, _, step_cpu in times)
    print(f"  {'all':<12}{total:9.1f}{cpu:9.1f}  ({int(total) // 60} min {int(total) % 60} s)")
