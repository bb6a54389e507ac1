# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What `fulmen learn` does: the chapters, their programs and the tests of their exercises.

A chapter is a folder chNN_name beside this file: chapter.py with TITLE, run(lesson) and EXERCISES,
its kernels, and exercise_1, exercise_2, ..., each a .cu or .py to be completed. Their solutions lie
under solutions/ in a folder of the same name. The text is docs/en/course and docs/zh/course.
"""

from __future__ import annotations

import argparse
import importlib
import re
import time
from pathlib import Path
from types import ModuleType

from fulmen.cli.output import ACCEPTABLE, BAD, BadInputError, Output, seconds_text

from .device import Device, DeviceError, Emulator, gpu
from .lesson import Lesson

HERE = Path(__file__).resolve().parent


def chapters() -> dict[int, Path]:
    """The folders of the chapters by number."""
    found = {}
    for path in sorted(HERE.glob("ch[0-9][0-9]_*")):
        found[int(path.name[2:4])] = path
    return found


def module_of(number: int) -> ModuleType:
    """chapter.py of a chapter.

    Raises:
        BadInputError: there is no such chapter.
    """
    if number not in chapters():
        there = ", ".join(str(n) for n in chapters())
        raise BadInputError(f"there is no chapter {number}; there are {there}")
    return importlib.import_module(f"course.{chapters()[number].name}.chapter")


def page_of(number: int) -> str:
    """The page with a chapter's text, by its path."""
    name = chapters()[number].name
    return f"docs/en/course/{name[2:4]}-{name[5:].replace('_', '-')}.md"


def exercise_file(number: int, exercise: int, solution: bool) -> Path:
    """The file of an exercise, or of its solution.

    Raises:
        BadInputError: there is no such exercise.
    """
    folder = chapters()[number]
    if solution:
        folder = HERE / "solutions" / folder.name
    found = sorted(folder.glob(f"exercise_{exercise}.*"))
    if not found:
        count = len(module_of(number).EXERCISES)
        raise BadInputError(f"chapter {number} has exercises 1 to {count}, and no {exercise}")
    return found[0]


def run_chapter(number: int, device: Device, output: Output) -> Lesson:
    """Runs the program of a chapter."""
    lesson = Lesson(device, output)
    module = module_of(number)
    lesson.say(f"{number}. {module.TITLE}, on the {device.name}")
    lesson.say()
    module.run(lesson)
    return lesson


def run_exercise(number: int, exercise: int, device: Device, output: Output, solution: bool,
                 ) -> list[str]:  # fmt: skip
    """Tests an exercise as its file stands.

    Returns:
        What is wrong with it, a sentence each.
    """
    path = exercise_file(number, exercise, solution)
    lesson = Lesson(device, output, quiet=True)
    try:
        module_of(number).EXERCISES[exercise - 1](lesson, path)
    except DeviceError as error:
        lesson.wrong.append(str(error))
    except NotImplementedError:
        lesson.wrong.append(f"{path.name} is not written yet")
    return lesson.wrong


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command, in a checkout."""
    if arguments.chapter is None:
        return _list(output)
    number = int(arguments.chapter)
    module_of(number)
    if arguments.exercise is not None:
        return _exercise(number, arguments, output)
    devices: list[Device] = []
    # The GPU first: the emulator is named libcuda.so.1 too, and NVRTC takes the first of the name.
    if arguments.on in (None, "gpu") and (found := gpu()) is not None:
        devices.append(found)
    if arguments.on in (None, "emulator"):
        devices.insert(0, Emulator())
    if not devices:
        raise BadInputError("--on gpu, where no GPU can be used; `fulmen doctor` says why")
    code, records = 0, []
    for device in devices:
        begin = time.monotonic()
        lesson = run_chapter(number, device, output)
        records.append({"device": device.name, "lines": lesson.lines, "wrong": lesson.wrong})
        lesson.say()
        for sentence in lesson.wrong:
            output.line(sentence, BAD)
        verdict = "something differs" if lesson.wrong else "as predicted"
        spent = seconds_text(time.monotonic() - begin)
        lesson.say(f"{verdict}, in {spent}; the text: {page_of(number)}")
        lesson.say()
        code = code or int(bool(lesson.wrong))
    if output.as_json:
        output.json({"chapter": number, "runs": records})
    return code


def _list(output: Output) -> int:
    found = []
    for number in chapters():
        module = module_of(number)
        found.append({"chapter": number, "title": module.TITLE, "page": page_of(number),
                      "exercises": len(module.EXERCISES)})  # fmt: skip
    if output.as_json:
        output.json(found)
        return 0
    output.table(
        ("chapter", "", "exercises", "text"),
        [(str(x["chapter"]), x["title"], str(x["exercises"]), x["page"]) for x in found],
    )
    output.line()
    output.line("fulmen learn 1 runs a chapter, fulmen learn 1 --exercise 1 tests an exercise")
    return 0


def _exercise(number: int, arguments: argparse.Namespace, output: Output) -> int:
    if arguments.on == "gpu":
        raise BadInputError("exercises are tested on the emulator, which counts; leave --on away")
    exercise = arguments.exercise
    wrong = run_exercise(number, exercise, Emulator(), output, arguments.solution)
    path = exercise_file(number, exercise, arguments.solution).relative_to(HERE.parent)
    if output.as_json:
        output.json({"chapter": number, "exercise": exercise, "solved": not wrong, "wrong": wrong})
    elif wrong:
        output.line(f"{number}.{exercise} is not solved: {wrong[0]}", BAD)
        output.line(f"edit {path}")
    else:
        output.line(f"{number}.{exercise} is solved", ACCEPTABLE)
    return 1 if wrong else 0


def exercises_of(number: int) -> range:
    """The numbers of a chapter's exercises, which are those of its files."""
    there = len(module_of(number).EXERCISES)
    files = [path for path in chapters()[number].iterdir() if re.match(r"exercise_\d", path.name)]
    assert len(files) == there, f"chapter {number} tests {there} exercises, and has {len(files)}"
    return range(1, there + 1)
