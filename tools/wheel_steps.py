# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `make test` that make the wheels and try them: build, repair, look inside, install.

They end in dist/ beside the sdist: fulmen, and fulmen-devel for C and C++, with the manylinux tag
that auditwheel finds they meet, which is no newer than GLIBC_FLOOR. They are built where the step
`gcc` has built, with its CMake: the same sources with the same flags are not compiled a second
time. The sdist is made in an environment that holds what pyproject.toml requires, and no more.
"""

from __future__ import annotations

import email
import re
import shutil
import sys
import tarfile
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
# An environment of pip's own has another CMake, for which all would be compiled again.
IN_PLACE = ["--no-build-isolation", "--check-build-dependencies"]
# Where nothing answers: what pip is given must be enough.
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}
GLIBC_FLOOR = (2, 34)  # as low as g++ 12 of Debian 12 links (cmake/wheel.cmake)
LARGEST_BYTES = 6_000_000  # of the wheel fulmen, and of the sdist


def the_wheel(folder: Path = DIST, name: str = "fulmen") -> Path:
    wheels = sorted(folder.glob(f"{name}-*.whl"))
    if len(wheels) != 1:
        raise StepError(f"{folder} holds {len(wheels)} wheels of {name}, expected one")
    return wheels[0]


def build(runner: Runner) -> None:
    """Source -> wheels -> repaired wheels in dist/, checked; fulmen's is installed into .venv."""
    raw = ROOT / "build" / "wheel"
    for folder in (raw, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    where = f"--config-settings=build-dir={ROOT / 'build' / 'release'}"
    for name, source in (("fulmen", "."), ("fulmen_devel", "./packaging/devel")):
        how: list[str | Path] = ["--no-deps", *IN_PLACE, "--wheel-dir", raw, where]
        runner.run([PYTHON, *PIP, "wheel", *how, source])
        made = the_wheel(raw, name)
        runner.run([PYTHON, "-m", "auditwheel", "repair", "--wheel-dir", DIST, made])
        wheel = the_wheel(DIST, name)
        runner.say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
        check_floor(wheel.name)
        runner.run([BIN / "check-wheel-contents", wheel])
        library = runner.run([PYTHON, "tools/check_library.py", _library_of(wheel)])
        runner.say(library.splitlines()[-1])
    wheel = the_wheel()
    check_size(wheel)
    runner.run([PYTHON, "-m", "build", "--sdist", "--outdir", DIST, "."])
    sdist = next(DIST.glob("fulmen-*.tar.gz"))
    check_size(sdist)
    with tarfile.open(sdist) as archive:
        check_sdist(archive.getnames())
    runner.run([PYTHON, *INSTALL, wheel])
    runner.run([PYTHON, *INSTALL, "--force-reinstall", "--no-deps", wheel])


def check_floor(name: str) -> None:
    """A wheel runs where its tag says: no newer glibc than was promised."""
    versions = [
        (int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)", name)
    ]
    if not versions or min(versions) > GLIBC_FLOOR:
        raise StepError(f"{name} does not run on glibc {'.'.join(map(str, GLIBC_FLOOR))}")


def check_size(file: Path) -> None:
    if file.stat().st_size >= LARGEST_BYTES:
        raise StepError(
            f"{file.name} has {file.stat().st_size} bytes, the limit is {LARGEST_BYTES}"
        )


def check_sdist(names: list[str]) -> None:
    """What builds the package is there, and the large example is not."""
    inside = {name.partition("/")[2] for name in names}
    for needed in ("CMakeLists.txt", "include/fulmen/fulmen.h", "src/api/attention.cpp",
                   "examples/data/decoder.safetensors", "LICENSE"):  # fmt: skip
        if needed not in inside:
            raise StepError(f"the sdist lacks {needed}")
    if "examples/data/encoder.safetensors" in inside:
        raise StepError(
            "the sdist holds examples/data/encoder.safetensors, which nothing there reads"
        )


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
    newest = "{}.{}".format(*max(found))
    _try_devel(runner, ROOT / "build" / f"python{newest}" / "bin" / "python")
    if len(found) < 2:
        runner.say("no second CPython on this machine: oldest and newest are the same one")


def _try_on(runner: Runner, wheel: Path, version: tuple[int, int], program: Path) -> str:
    """Installs a wheel for one Python, from a folder, and runs the command."""
    name = "{}.{}".format(*version)
    folder, packages = ROOT / "build" / f"python{name}", ROOT / "build" / f"packages{name}"
    runner.run([program, "-m", "venv", "--clear", folder])
    python = folder / "bin" / "python"
    runner.run([python, *PIP, "download", "--only-binary=:all:", "--dest", packages, wheel])
    offline: list[str | Path] = [*INSTALL, "--find-links", packages, "--find-links", DIST]
    runner.run([python, *offline, "fulmen[devel]"], env=OFFLINE)
    for command in ("doctor", "run"):
        runner.run([folder / "bin" / "fulmen", command])
    verified = runner.run([folder / "bin" / "fulmen", "verify", *CASES_ON_EACH_PYTHON])
    return f"CPython {name}: doctor, run, verify: {verified.strip().splitlines()[-1]}"


def _try_devel(runner: Runner, python: Path) -> None:
    """The examples in C and C++ against the package that pip has installed."""
    build = ROOT / "build" / "examples-devel"
    package = runner.run([python, "-m", "fulmen", "--cmake-dir"]).strip()
    where = ["-S", "examples", "-B", str(build), f"-Dfulmen_DIR={package}"]
    runner.run([BIN / "cmake", "-G", "Ninja", *where])
    runner.run([BIN / "cmake", "--build", build])
    for program in ("attention_c", "attention_c_static", "attention_cpp"):
        runner.run([build / program])


def _minimum(wheel: Path) -> tuple[int, int]:
    """The oldest Python that the wheel's metadata allows."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        requires = email.message_from_bytes(archive.read(metadata))["Requires-Python"] or ""
    match = re.search(r">=\s*(\d+)\.(\d+)", requires)
    return (int(match[1]), int(match[2])) if match else sys.version_info[:2]
