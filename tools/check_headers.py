# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Every header compiles alone, twice in one file, without a warning; fulmen.h as C11 and as C++.

So a header includes all that it names, and its include guard works. A header that a source file
includes before anything else is compiled alone by the build, and left out here if it has a guard.
So is device text outside the shared law (kernels/ptx and above): the tests of its own backend
compile it.
Run by `make check`; CXX and CC choose the compilers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_layers import layer_of
from source_tree import Finding, files, relative, report

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]
GUARD = re.compile(r"^#(pragma once|ifndef \w+\n#define \w+)$", re.MULTILINE)


def check(root: Path) -> list[Finding]:
    sources = [path for path in files(root, (".cpp",)) if path.is_relative_to(root / "src")]
    built = {first_include(path) for path in sources}
    jobs = []
    for path in files(root, (".h", ".hpp", ".cuh")):
        name = relative(path, root)
        if layer_of(name) in (None, "device", "examples"):
            continue
        if include_name(name) in built and GUARD.search(path.read_text()):
            continue
        jobs.append((root, name, "c++"))
        if name == "include/fulmen/fulmen.h":
            jobs.append((root, name, "c"))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = pool.map(lambda job: _compile(*job), jobs)
    return [finding for finding in results if finding]


def first_include(source: Path) -> str:
    """What a source file includes first, as it is written there."""
    found = re.search(r'^#include [<"]([^">]+)', source.read_text(), re.MULTILINE)
    return found[1] if found else ""


def include_name(path: str) -> str:
    """How sources of this project include a header of it."""
    return path.removeprefix("src/").removeprefix("include/")


def _compile(root: Path, name: str, language: str) -> Finding | None:
    compiler = os.environ.get("CXX", "g++") if language == "c++" else os.environ.get("CC", "gcc")
    standard = "-std=c++20" if language == "c++" else "-std=c11"
    folders = ["include", "src"]
    if name.startswith("src/emulator/"):  # its own kernels/ptx comes before that of GPUs
        folders.insert(0, "src/emulator")
    command = [*shlex.split(compiler), "-x", language, standard, *WARNINGS, "-fsyntax-only",
               *(f"-I{root}/{folder}" for folder in folders), "-"]  # fmt: skip
    text = f'#include "{include_name(name)}"\n' * 2
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    said = (errors or done.stderr.splitlines() or ["the compiler said nothing"])[0]
    return Finding(name, 0, f"does not compile alone as {standard[5:]}: {said}")


if __name__ == "__main__":
    report(check, "Checks that every header compiles alone.")
