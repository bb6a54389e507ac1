# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `make test` that make the wheel and try it: build, repair, look inside, install.

The wheel ends in dist/, with the widest manylinux tag that auditwheel finds it meets. It is built
where the step `gcc` has built: the same sources with the same flags are not compiled a second time.
"""

from __future__ import annotations

import email
import re
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import interpreters
from source_tree import ROOT
from step_runner import Runner, StepError

BIN = ROOT / ".venv" / "bin"
PYTHON = BIN / "python"
DIST = ROOT / "dist"
CASES_ON_EACH_PYTHON = ["packed", "empty"]  # the command and the binding; other steps do the rest
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "--no-compile"]  # most modules of NumPy are never imported here


def the_wheel(folder: Path = DIST) -> Path:
    wheels = sorted(folder.glob("fulmen-*.whl"))
    if len(wheels) != 1:
        raise StepError(f"{folder} holds {len(wheels)} wheels of fulmen, expected one")
    return wheels[0]


def build(runner: Runner) -> None:
    """Source -> wheel -> repaired wheel in dist/, checked and installed into .venv."""
    raw = ROOT / "build" / "wheel"
    for folder in (raw, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    where = "-Cbuild-dir=build/release"
    runner.run([PYTHON, *PIP, "wheel", "--no-deps", "--wheel-dir", raw, where, "."])
    runner.run([PYTHON, "-m", "auditwheel", "repair", "--wheel-dir", DIST, the_wheel(raw)])
    wheel = the_wheel()
    runner.say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    runner.run([BIN / "check-wheel-contents", wheel])
    runner.say(runner.run([PYTHON, "tools/check_library.py", _library_of(wheel)]).splitlines()[-1])
    runner.run([PYTHON, *INSTALL, wheel])
    runner.run([PYTHON, *INSTALL, "--force-reinstall", "--no-deps", wheel])


def _library_of(wheel: Path) -> Path:
    """Takes the one shared library out of a wheel."""
    folder = ROOT / "build" / "wheel" / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if re.search(r"libfulmen[^/]*\.so[.\d]*$", n)]
        if len(names) != 1:
            raise StepError(f"{wheel.name} holds {len(names)} libraries, expected one: {names}")
        return Path(archive.extract(names[0], folder))


def pythons(runner: Runner) -> None:
    """The repaired wheel in a fresh environment of the oldest and of the newest CPython here."""
    wheel = the_wheel()
    found = interpreters.oldest_and_newest(_minimum(wheel))
    with ThreadPoolExecutor() as pool:  # installing leaves a core idle
        for line in pool.map(partial(_try_on, runner, wheel), *zip(*found.items())):
            runner.say(line)
    if len(found) < 2:
        runner.say("no second CPython on this machine: oldest and newest are the same one")


def _try_on(runner: Runner, wheel: Path, version: tuple[int, int], program: Path) -> str:
    """Installs a wheel for one Python and runs the command."""
    name = "{}.{}".format(*version)
    folder = ROOT / "build" / f"python{name}"
    runner.run([program, "-m", "venv", "--clear", folder])
    runner.run([folder / "bin" / "python", *INSTALL, wheel])
    for command in ("doctor", "run"):
        runner.run([folder / "bin" / "fulmen", command])
    verified = runner.run([folder / "bin" / "fulmen", "verify", *CASES_ON_EACH_PYTHON])
    return f"CPython {name}: doctor, run, verify: {verified.strip().splitlines()[-1]}"


def _minimum(wheel: Path) -> tuple[int, int]:
    """The oldest Python that the wheel's metadata allows."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        requires = email.message_from_bytes(archive.read(metadata))["Requires-Python"] or ""
    match = re.search(r">=\s*(\d+)\.(\d+)", requires)
    return (int(match[1]), int(match[2])) if match else sys.version_info[:2]
