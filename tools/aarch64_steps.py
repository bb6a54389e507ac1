# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `make test-full` for AArch64: cross-built, run under qemu.

bootstrap.sh installs the cross compiler and qemu where it may; without them a step is skipped with
a line that names their Debian packages. The C++ tests and examples; then the wheel, which a Python
of that architecture imports: Debian's, unpacked into build/aarch64-python, not installed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import wheel_steps
from source_tree import ROOT
from step_runner import Runner
from wheel_steps import BIN, DIST, PIP, PYTHON

BUILD = ROOT / "build" / "aarch64"
TOOLCHAIN = f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64.cmake'}"
GOOGLETEST = Path("/usr/src/googletest")  # sources, of the package that libgtest-dev brings
TESTS = "^(cpu|api|core|plan|kernels|include)_test|^example_"
SYSTEM = ROOT / "build" / "aarch64-python"
PACKAGES = [
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1"),
    *("libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5"),
]
PLATFORMS = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (17, 27, 28, 34)]
JOBS = str(os.cpu_count() or 1)
# In one process: what a Python under qemu starts runs without qemu.
CASES = ["empty", "u08_nan_past_the_lengths", "dim8_v128_float16"]


def is_missing(runner: Runner) -> bool:
    needed = {"g++-aarch64-linux-gnu": shutil.which("aarch64-linux-gnu-g++"),
              "qemu-user-static": shutil.which("qemu-aarch64-static"),
              "googletest": GOOGLETEST.is_dir()}  # fmt: skip
    missing = [package for package, is_there in needed.items() if not is_there]
    if missing:
        runner.say(f"skipped: no {', '.join(missing)} (names of Debian packages)")
    return bool(missing)


def tests(runner: Runner) -> None:
    """The C++ tests and examples."""
    if is_missing(runner):
        return
    build = ROOT / "build" / "googletest-aarch64"
    where = ["-S", str(GOOGLETEST), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    runner.run([BIN / "cmake", "-G", "Ninja", *where, TOOLCHAIN])
    runner.run([BIN / "cmake", "--build", build, "--parallel", JOBS])
    runner.run([BIN / "cmake", "--install", build, "--prefix", build / "prefix"])
    package = f"-DGTest_DIR={build / 'prefix' / 'lib' / 'cmake' / 'GTest'}"
    runner.run([BIN / "cmake", "--preset", "aarch64", package])
    runner.run([BIN / "cmake", "--build", "--preset", "aarch64", "--parallel", JOBS])
    chosen = ["--tests-regex", TESTS, "--parallel", JOBS]
    runner.run([BIN / "ctest", "--preset", "aarch64", *chosen], show=True)


def wheel(runner: Runner) -> None:
    """The wheel, as pip installs it on AArch64: doctor, and cases against float64."""
    if is_missing(runner):
        return
    raw, repaired = ROOT / "build" / "wheel-aarch64", DIST / "aarch64"
    for folder in (raw, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    how: list[str | Path] = ["--no-deps", *wheel_steps.IN_PLACE, "--wheel-dir", raw]
    for setting in (f"build-dir={BUILD}", f"cmake.args={TOOLCHAIN}",
                    "cmake.define.FULMEN_BUILD_TESTS=OFF",
                    "cmake.define.FULMEN_BUILD_EXAMPLES=OFF"):  # fmt: skip
        how.append(f"--config-settings={setting}")
    cross = {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}  # the tag of the wheel
    runner.run([PYTHON, *PIP, "wheel", *how, "."], env=cross)
    made = wheel_steps.the_wheel(raw)
    runner.run([PYTHON, "-m", "auditwheel", "repair", "--wheel-dir", repaired, made])
    found = wheel_steps.the_wheel(repaired)
    wheel_steps.check_floor(found.name)
    wheel_steps.check_size(found)
    python = unpack_python(runner)
    site = install_into(runner, found)
    env = {"PYTHONPATH": str(site)}
    runner.run([*python, "-m", "fulmen", "doctor"], env=env)
    verified = runner.run([*python, "-m", "fulmen", "verify", "--jobs", "1", *CASES], env=env)
    runner.say(f"{found.name}: doctor, verify: {verified.strip().splitlines()[-1]}")


def unpack_python(runner: Runner) -> list[str | Path]:
    """Debian's CPython for arm64, of lists and packages that apt keeps in this folder."""
    system, packages = SYSTEM / "root", SYSTEM / "packages"
    (SYSTEM / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    packages.mkdir(exist_ok=True)
    folders = {"Dir::State::Lists": SYSTEM / "lists", "Dir::Cache::pkgcache": "",
               "Dir::Cache::srcpkgcache": "", "APT::Architecture": "arm64",
               "APT::Architectures": "arm64"}  # fmt: skip
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in folders.items()), "-qq"]
    python = system / "usr" / "bin" / "python3.11"
    if not python.exists():
        runner.run([*apt, "update"])
        runner.run([*apt, "download", *PACKAGES], cwd=packages)
        for package in sorted(packages.glob("*.deb")):
            runner.run(["dpkg-deb", "--extract", package, system])
    return ["qemu-aarch64-static", "-L", system, python]


def install_into(runner: Runner, found: Path) -> Path:
    """The wheel and what it requires, for that Python."""
    site = SYSTEM / "site"
    shutil.rmtree(site, ignore_errors=True)
    which = ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", *PLATFORMS]
    runner.run([PYTHON, *PIP, "install", "--no-compile", *which, "--target", site, found])
    return site
