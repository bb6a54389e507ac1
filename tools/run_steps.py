# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of `make check`, `make test` and `make test-full`, one short function each.

    run_steps.py check | test | test-full [STEP...]    only the named steps; --list shows them

bootstrap.sh has run before: .venv holds the tools. Everything is built below build/. Steps run in
this order, three at a time, as soon as those are done whose results they need. test_budget.txt says
how many seconds of CPU each step of `make test` may take.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import aarch64_steps
import wheel_steps
from source_tree import ROOT
from step_runner import Runner, Step, StepError, read_budget, run_all
from wheel_steps import BIN, PYTHON

BUDGET = ROOT / "tools" / "test_budget.txt"
PREFIX = ROOT / "build" / "prefix"
JOBS = str(os.cpu_count() or 1)
# In the covering set every two values of every two options meet.
COVERING_CASES = ["grid0_*"]
# Cases of `fulmen verify` under sanitizers; `make test` takes the covering set alone. The C++ tests
# draw problems at random and are sanitized too.
CASES_UNDER_SANITIZERS = [*COVERING_CASES, "bug", "packed"]
# ThreadSanitizer has something to say only where threads are: the tiled implementation.
THREADED = ["--implementation", "tiled"]
# C++ tests that `make test` leaves out under AddressSanitizer: ten of the twelve parts of the drawn
# problems, and what compares numbers bit by bit. `gcc` runs them whole.
MOST_DRAWN_PROBLEMS = (
    "-Drawn/*/?:All/OptionAsText.*:TileProducts.Emulated*:BlockMap.IsTheDefinition*"
)
# And under ThreadSanitizer: numbers, at twenty times the time.
NOT_ABOUT_THREADS = f"{MOST_DRAWN_PROBLEMS}:*AgreesWithTheOracle/*:VectorMath.*:*KernelTable*"
# A case for each thing that only the whole path to a GPU shows: hidden NaN, head dims apart, pages.
# Each compiles a dozen kernels; test-full runs every case, and the covering set in more schedules.
EMULATED_CASES = ["u08_nan_past_the_lengths", "dim8_v128_float16", "b06_window_of_each_draft"]
SCHEDULES = range(2, 21)
PYTEST: list[str | Path] = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def is_full() -> bool:
    """Whether this is test-full: what `make test` leaves out runs too."""
    return bool(os.environ.get("FULMEN_TEST_FULL"))


def formatting(runner: Runner) -> None:
    runner.run([PYTHON, "tools/format.py", "--check"])


def lint(runner: Runner) -> None:
    runner.run([BIN / "ruff", "check", "."])
    runner.run([BIN / "codespell"])


def types(runner: Runner) -> None:
    runner.run([BIN / "mypy", "python/fulmen"])
    tools = ROOT / "tools"
    runner.run(
        [BIN / "mypy", *sorted(tools.glob("*.py")), *sorted((tools / "pictures").glob("*.py"))]
    )
    course = ROOT / "course"
    runner.run([BIN / "mypy", *sorted(course.glob("*.py")), *sorted(course.glob("ch*/chapter.py"))])


def sources(runner: Runner) -> None:
    runner.run([PYTHON, "tools/plant_faults.py", "--check"])
    runner.run([PYTHON, "tools/kernel_coverage.py", "--check"])
    for line in runner.run([PYTHON, "tools/check_sources.py"]).splitlines():
        if line.startswith("long file"):
            runner.say(line)


def pages(runner: Runner) -> None:
    runner.run([PYTHON, "tools/docs_tables.py", "--check"])


def measures(runner: Runner) -> None:
    runner.run([PYTHON, "tools/measures.py"])


def layers(runner: Runner) -> None:
    runner.run([PYTHON, "tools/check_layers.py"])
    runner.run([PYTHON, "tools/import_layers.py"])


def headers(runner: Runner) -> None:
    runner.run([PYTHON, "tools/check_headers.py"])


def checkers(runner: Runner) -> None:
    needs_package = "tests/tools/test_check_course.py"  # which the step `course` runs
    runner.run([*PYTEST, "tests/tools", f"--ignore={needs_package}"], show=True)


def build_and_test(runner: Runner, preset: str, *options: str, env: dict[str, str]) -> None:
    """One CMake preset: configure, compile with warnings as errors, run the C++ tests."""
    runner.run([BIN / "cmake", "--preset", preset, *options])
    runner.run([BIN / "cmake", "--build", "--preset", preset, "--parallel", JOBS])
    runner.run([BIN / "ctest", "--preset", preset, "--parallel", JOBS], env=env, show=True)


def gcc(runner: Runner) -> None:
    every_kernel = f"-DFULMEN_EVERY_KERNEL={'ON' if is_full() else 'OFF'}"
    options = ["-DFULMEN_UNITY=ON", "-DFULMEN_BUILD_STATIC=ON", every_kernel]
    build_and_test(runner, "release", *options, env={})
    runner.run([BIN / "cmake", "--install", "build/release", "--prefix", PREFIX])
    for library in PREFIX.glob("lib*/**/libfulmen.so"):
        runner.run([PYTHON, "tools/check_library.py", library])


def _clang(runner: Runner) -> tuple[str, list[str]]:
    """clang++ 16 or later, and what tells CMake to use it."""
    compiler = runner.run([ROOT / "tools" / "find_clang.sh"]).strip()
    c_compiler = compiler.replace("clang++", "clang")
    runner.say(compiler)
    return compiler, [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_C_COMPILER={c_compiler}"]


def clang(runner: Runner) -> None:
    build_and_test(runner, "clang", *_clang(runner)[1], env={})


def kernels(runner: Runner) -> None:
    """By the compiler that users have, from its wheel, for each architecture; no GPU is needed."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise StepError("the wheel nvidia-cuda-nvrtc is not in .venv")
    env = {"FULMEN_TEST_NVRTC": str(Path(folders[0]) / "cu13" / "lib")}
    program = ROOT / "build" / "release" / "tests" / "gpu" / "gpu_kernels_test"
    runner.run([program, "--gtest_filter=CompileKernels.*"], env=env, show=True)


def packages(runner: Runner) -> None:
    """Beside other steps, since to unpack PyTorch keeps one core busy for long."""
    for purpose in ("torch", "triton") if is_full() else ("torch",):
        for line in runner.run([ROOT / "tools" / "bootstrap.sh", purpose]).splitlines():
            runner.say(line)


def torch_tests(runner: Runner) -> None:
    """Skipped, with one line, where bootstrap.sh could not install torch."""
    if importlib.util.find_spec("torch") is None:
        runner.say("skipped: no torch in .venv")
        return
    runner.run([*PYTEST, "-n", JOBS, "tests/torch", "tests/jax"], show=True)


def python_tests(runner: Runner) -> None:
    """All but test_cases.py, whose cases the step `verify` runs, by the command users have."""
    every_case = "--ignore=tests/cases/test_cases.py"
    folders = ["tests/python", "tests/cases"]
    runner.run([*PYTEST, "-n", JOBS, every_case, *folders], show=True)


def verify(runner: Runner) -> None:
    """The last line, 'N passed, N failed, N skipped', alone on a line of its own."""
    print(runner.run([BIN / "fulmen", "verify"]).strip().splitlines()[-1], flush=True)


EMULATED_GPU = "build/release/tests/emulator/gpu/libfulmen_emulated_gpu.so"
ON_EMULATOR = {"FULMEN_EMULATOR": str(ROOT / EMULATED_GPU),
               "FULMEN_EMULATOR_CACHE": str(ROOT / "build" / "emulator")}  # fmt: skip


def emulated(runner: Runner) -> None:
    """GPU kernels through the public path, on the emulator: plan, cache, compiler, launch."""
    env = ON_EMULATOR
    verify_emulated: list[str | Path] = [BIN / "fulmen", "verify", "--backend", "emulator"]
    cases = [] if is_full() else EMULATED_CASES
    found = runner.run([*verify_emulated, *cases], env=env)
    print(found.strip().splitlines()[-1], flush=True)
    runner.run([*PYTEST, "tests/python/test_emulator.py"], env=env)
    for seed in SCHEDULES if is_full() else ():
        seeded = {**env, "FULMEN_EMULATOR_SEED": str(seed)}
        runner.run([*verify_emulated, *COVERING_CASES], env=seeded)


def course(runner: Runner) -> None:
    """Exercises fail as they stand, solutions pass; test-full runs every chapter's program too."""
    runner.run([*PYTEST, "tests/tools/test_check_course.py"])
    sample = [] if is_full() else ["--sample"]
    found = runner.run([PYTHON, "tools/check_course.py", *sample], env=ON_EMULATOR)
    runner.say(f"{len(found.splitlines())} chapters without a fault")


def audited(runner: Runner) -> None:
    """Faults in the text of GPU kernels, one at a time; and their statements, all of them."""
    runner.run([PYTHON, "tools/plant_faults.py"], show=True)
    runner.say(runner.run([PYTHON, "tools/kernel_coverage.py"]).strip().splitlines()[-1])


def examples(runner: Runner) -> None:
    build = ROOT / "build" / "examples"
    where = ["-S", "examples", "-B", str(build), f"-DCMAKE_PREFIX_PATH={PREFIX}"]
    runner.run([BIN / "cmake", "-G", "Ninja", *where])
    runner.run([BIN / "cmake", "--build", build])
    programs = [p for p in sorted(build.iterdir()) if p.is_file() and os.access(p, os.X_OK)]
    for program in programs:
        runner.run([program])
    scripts = sorted((ROOT / "examples" / "python").glob("*.py"))  # tests/torch runs the others
    for script in scripts:
        runner.run([PYTHON, script])
    runner.say(f"{len(programs)} programs and {len(scripts)} scripts ran")


def docs(runner: Runner) -> None:
    runner.run([PYTHON, "tools/pictures", "--check"])
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    runner.run([BIN / "mkdocs", "build", "--strict", "--quiet"], env=quiet)
    env = {"FULMEN_PREFIX": str(PREFIX)}
    runner.run([*PYTEST, "tests/docs"], env=env, show=True)
    pages = [] if is_full() else ["course"]
    looked_at = runner.run([PYTHON, "tools/check_site.py", *pages])
    runner.say(looked_at.strip().splitlines()[-1])
    blocks = ["--markdown-docs", "--markdown-docs-syntax=superfences"]
    runner.run([*PYTEST, *blocks, "docs/en", "README.md"], show=True)


def _sanitized(
    runner: Runner, preset: str, runtime: tuple[str, str], options: dict[str, str]
) -> None:
    """Named cases in Python, the sanitizer's run time loaded first; `options`: its environment."""
    libraries = [runner.run([compiler, f"-print-file-name={name}"]).strip()
                 for compiler, name in (runtime, ("g++", "libstdc++.so"))]  # fmt: skip
    env = {**options, "LD_PRELOAD": ":".join(libraries),
           "FULMEN_LIBRARY": str(ROOT / "build" / preset / "libfulmen.so")}  # fmt: skip
    cases = CASES_UNDER_SANITIZERS if is_full() else COVERING_CASES
    ways = THREADED if preset == "tsan" else []
    verify = ["-m", "fulmen", "verify", "--jobs", JOBS, *ways, *cases]
    runner.say(runner.run([PYTHON, *verify], env=env).strip().splitlines()[-1])


def asan(runner: Runner) -> None:
    """By clang++, so that one build shows its warnings and the sanitizers' findings."""
    compiler, chosen = _clang(runner)
    cpp_tests = "*" if is_full() else MOST_DRAWN_PROBLEMS
    build_and_test(runner, "asan", *chosen, env={"GTEST_FILTER": cpp_tests})
    runtime = (compiler, f"libclang_rt.asan-{platform.machine()}.so")
    _sanitized(runner, "asan", runtime, {"ASAN_OPTIONS": "detect_leaks=0"})  # Python's own


def tsan(runner: Runner) -> None:
    options = {"TSAN_OPTIONS": "halt_on_error=1"}
    cpp_tests = "*" if is_full() else NOT_ABOUT_THREADS
    build_and_test(runner, "tsan", env={**options, "GTEST_FILTER": cpp_tests})
    _sanitized(runner, "tsan", ("g++", "libtsan.so"), options)


CHECKS = [
    Step("format", "clang-format and ruff format", formatting),
    Step("lint", "ruff, spelling", lint),
    Step("types", "mypy --strict", types),
    Step("sources", "licence lines, no path of one machine", sources),
    Step("pages", "tables in the pages are what their sources say", pages),
    Step("measures", "files to touch, listings, lengths, words: each below its limit", measures),
    Step("layers", "who may include whom", layers),
    Step("headers", "each header compiles alone", headers),
]
TESTS = [
    Step("packages", "PyTorch and what its tests need", packages),
    Step("gcc", "g++ -Werror, C++ tests", gcc),
    Step("checkers", "the checks see what they should", checkers),
    Step("wheel", "build, repair, glibc, symbols, size, install", wheel_steps.build,
         ("gcc", "packages")),
    Step("kernels", "GPU kernels compile for every architecture and pass the gate", kernels,
         ("gcc",)),
    Step("asan", "clang++ -Werror, AddressSanitizer and UndefinedBehaviorSanitizer", asan,
         ("wheel",)),
    Step("tsan", "ThreadSanitizer", tsan, ("wheel",)),
    Step("torch", "PyTorch, Hugging Face, flash-attn names", torch_tests, ("wheel",)),
    Step("emulated", "named cases on GPU kernels, which the CPU emulates", emulated, ("wheel",)),
    Step("course", "its programs, exercises and solutions, on the emulator", course, ("wheel",)),
    Step("python", "Python tests and cases", python_tests, ("wheel",)),
    Step("verify", "every named case on every implementation", verify, ("wheel",)),
    Step("examples", "C, C++ and Python against the installed package", examples, ("wheel",)),
    Step("docs", "strict build, pictures, code blocks", docs, ("wheel",)),
    Step("pythons", "the wheels, without network, on the oldest and newest CPython",
         wheel_steps.pythons, ("wheel",)),
]  # fmt: skip
FULL_TESTS = [
    *TESTS,
    Step("clang", "optimised by clang++, C++ tests", clang),
    Step("aarch64", "cross-built, C++ tests and examples under qemu", aarch64_steps.tests),
    Step(
        "aarch64-wheel",
        "its wheel, imported by a Python under qemu",
        aarch64_steps.wheel,
        ("aarch64", "wheel"),
    ),
    Step("audited", "no fault planted into a GPU kernel passes the emulator's tests", audited),
]
PLANS = {"check": CHECKS, "test": CHECKS + TESTS, "test-full": CHECKS + FULL_TESTS}


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the steps of `make check` and `make test`.")
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("steps", nargs="*", help="only these")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    parser.add_argument("--set-budget", action="store_true", help="write what the steps took")
    arguments = parser.parse_args()
    steps = PLANS[arguments.plan]
    unknown = set(arguments.steps) - {step.name for step in steps}
    if unknown:
        there = ", ".join(step.name for step in steps)
        parser.error(f"no step {', '.join(sorted(unknown))}; there are: {there}")
    if arguments.list:
        print("\n".join(f"{step.name:<10} {step.says}" for step in steps))
        return 0
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    # NumPy's own threads would spin beside ours, and a sanitizer would accuse them of races.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if arguments.plan == "test-full":
        os.environ["FULMEN_TEST_FULL"] = "1"  # every kernel, every sample, every model
    chosen = [step for step in steps if not arguments.steps or step.name in arguments.steps]
    names = {step.name for step in chosen}  # what is left out was built before
    chosen = [replace(step, after=tuple(names & set(step.after))) for step in chosen]
    slowness = float(os.environ.get("FULMEN_TEST_SLOWNESS", "1"))  # of this machine
    is_held = arguments.plan != "test-full" and not arguments.set_budget
    budget = {name: slowness * row for name, row in read_budget(BUDGET).items()} if is_held else {}
    new_budget = BUDGET if arguments.set_budget else None
    return run_all(f"make {arguments.plan}", chosen, Path(ROOT), budget, new_budget)


if __name__ == "__main__":
    sys.exit(main())
