# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs the course: every chapter's program, exercise and solution, on the emulator.

    check_course.py                every chapter
    check_course.py 1 4            these
    check_course.py --sample       in `make test`: every exercise and solution, and the programs of
                                   the chapters that take the least time

A chapter passes when its results are right and its counters are what it predicts, when each
exercise fails as it stands and its solution passes, and when its kernels have at most 120 lines.
Where NVRTC is, all of it is compiled for GPUs too, without one.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from source_tree import ROOT

sys.path.insert(0, str(ROOT))

from course import learn
from course.device import DeviceError, Emulator, compiled, nvrtc_at

import fulmen
from fulmen.cli.output import Output

MOST_LINES = 120  # of a kernel
SAMPLED_CHAPTERS = (3,)
ARCHITECTURES = ("sm_80", "sm_90")  # of a chapter that names none
Texts = list[tuple[Path, dict[str, int | str]]]


def long_kernels(number: int) -> list[str]:
    """Kernels of a chapter that a learner does not read in one sitting."""
    said = []
    for path in sorted(learn.chapters()[number].glob("*.cu")):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MOST_LINES:
            said.append(f"{path.name} has {lines} lines; {MOST_LINES} are allowed")
    return said


def wrong_exercises(number: int, device: Emulator, output: Output) -> list[str]:
    """What is wrong with the exercises of a chapter."""
    said = []
    for exercise in learn.exercises_of(number):
        if not learn.run_exercise(number, exercise, device, output, False):
            said.append(f"exercise {number}.{exercise} is solved as it stands")
        for sentence in learn.run_exercise(number, exercise, device, output, True):
            said.append(f"the solution of {number}.{exercise}: {sentence}")
    return said


def refused(texts: Texts, architectures: tuple[str, ...]) -> list[str]:
    """Of kernels' files and their constants, those that NVRTC does not compile.

    Not to be called where the emulator is loaded: NVRTC would take it for the driver.
    """
    nvrtc = fulmen.gpu_info()["nvrtc"]
    if not nvrtc:
        return []
    library, said = nvrtc_at(nvrtc["path"]), []
    for path, constants in texts:
        for arch in architectures:
            try:
                compiled(library, path, constants, arch)
            except DeviceError as error:
                said.append(f"{path.name} for {arch}: {error}")
    return said


def check(number: int, device: Emulator, output: Output, sample: bool) -> list[str]:
    """What is wrong with a chapter."""
    said = long_kernels(number) + wrong_exercises(number, device, output)
    device.compiled.clear()
    if not sample or number in SAMPLED_CHAPTERS:
        try:
            lesson = learn.run_chapter(number, device, output)
            said += lesson.wrong
        except DeviceError as error:
            said.append(str(error))
    if not sample:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            module = learn.module_of(number)
            architectures = getattr(module, "ARCHITECTURES", ARCHITECTURES)
            said += process.submit(refused, device.compiled, architectures).result()
    return [re.sub(r"\s+", " ", sentence) for sentence in said]


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the chapters of the course.")
    parser.add_argument("chapters", nargs="*", type=int, help="only these")
    parser.add_argument("--sample", action="store_true", help="what `make test` runs")
    arguments = parser.parse_args()
    device, output = Emulator(), Output(as_json=True)  # chapters print nothing
    failures = 0
    for number in arguments.chapters or learn.chapters():
        begin = time.monotonic()
        said = check(number, device, output, arguments.sample)
        failures += len(said)
        for sentence in said:
            print(f"chapter {number}: {sentence}")
        print(f"chapter {number}: {len(said)} faults, {time.monotonic() - begin:.1f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
