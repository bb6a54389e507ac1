# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds and installs the package into the environment of this Python, and says how far it is.

Called by `make run`. pip is silent for as long as the compiler works, one to twelve minutes; here a
line says which step it is and, while files are compiled, how many of how many and the time so far.
On a terminal the line is written over; elsewhere there is one for each tenth. All that pip prints
goes to build/logs/install.log, whose end is shown when it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "logs" / "install.log"
LINES_OF_LOG_ON_FAILURE = 40
# A line of pip, and what has begun with it; each counts once, in this order.
STEPS = (
    (re.compile("Installing build dependencies"), "fetching the build tools (CMake, Ninja)"),
    (re.compile(r"Preparing metadata"), "reading the version of the package"),
    (re.compile(r"^Collecting |^Processing .*\.whl"), "fetching the packages that fulmen needs"),
    (re.compile(r"Configuring CMake|Building wheel for fulmen"), "looking at the compiler"),
    (re.compile(r"^\s*\[ *[1-9]\d*/\d+\]"), "compiling libfulmen (with all cores)"),
    (re.compile(r"Installing collected packages: .*fulmen"), "installing"),
)
COMPILED = re.compile(r"^\s*\[ *(\d+)/(\d+)\] (?:Building \w+ object )?(.*)")


class Progress:
    """The line that says how far it is."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.step = 0
        self.tenth = -1
        self.is_terminal = sys.stdout.isatty()

    def see(self, line: str) -> None:
        """One line of pip."""
        for index in range(self.step, len(STEPS)):
            pattern, says = STEPS[index]
            if pattern.search(line):
                self.step = index + 1
                self._end_line()
                print(f"[{self.step}/{len(STEPS)}] {says}", flush=True)
                break
        compiled = COMPILED.match(line)
        if compiled is not None and int(compiled[2]) > 2:  # not Ninja's look at folders
            self._compiled(int(compiled[1]), int(compiled[2]), compiled[3])

    def _compiled(self, done: int, total: int, what: str) -> None:
        spent = _minutes(time.monotonic() - self.begin)
        if self.is_terminal:
            name = what.rsplit("/", 1)[-1].removesuffix(".o")[:40]
            print(f"\r\x1b[K      {done} of {total} files, {spent}: {name}", end="", flush=True)
        elif 10 * done // total > self.tenth:
            self.tenth = 10 * done // total
            print(f"      {done} of {total} files, {spent}", flush=True)

    def finished(self) -> None:
        """Everything is done."""
        self._end_line()
        print(f"installed in {_minutes(time.monotonic() - self.begin)}", flush=True)

    def _end_line(self) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", flush=True)


def _minutes(seconds: float) -> str:
    return (
        f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 60 else f"{seconds:.0f} s"
    )


def run(command: list[str], see: Callable[[str], None]) -> int:
    """Runs a command, shows each line that it prints to `see`, and returns its exit code."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        see(line)
    return process.wait()


def main() -> int:
    LOG.parent.mkdir(parents=True, exist_ok=True)
    print(f"building fulmen: one to twelve minutes; details in {LOG.relative_to(ROOT)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--verbose", "--no-input"]
    progress = Progress()
    lines: deque[str] = deque(maxlen=LINES_OF_LOG_ON_FAILURE)
    with LOG.open("w", encoding="utf-8", buffering=1) as log:

        def see(line: str) -> None:
            log.write(line)
            lines.append(line)
            progress.see(line)

        code = run([*pip, "--disable-pip-version-check", "--progress-bar=off", "."], see)
    if code != 0:
        print(f"\n{''.join(lines)}\nthe build failed; all that it printed is in {LOG}")
        return 1
    progress.finished()
    return 0


if __name__ == "__main__":
    sys.exit(main())
