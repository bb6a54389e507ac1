# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The machine code of the kernels that the tests compile, as a list of hashes.

It proves that a move or a rename changed no instruction, and shows what another change costs:

    machine_code.py list [FILTER]          compiles; one line a kernel: arch, name, hash, registers
                                           a thread, bytes spilled
    machine_code.py compare OLD [FILTER]   the same, and what the list in the file OLD lacks

Needs build/release (gpu_kernels_test) and the pinned NVRTC of .venv; FILTER is a --gtest_filter.
The hash is of the executable sections alone, so names of kernels and files do not matter; `compare`
pairs kernels by their code, so a renamed kernel counts as the same. Lists say in their first line
which NVRTC compiled; another one makes other code.
FULMEN_TEST_FULL=1 takes every kernel on every architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from source_tree import ROOT

PROGRAM = ROOT / "build" / "release" / "tests" / "gpu" / "gpu_kernels_test"


def nvrtc_folder() -> Path:
    found = importlib.util.find_spec("nvidia")
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise SystemExit("the wheel nvidia-cuda-nvrtc is not in .venv: run `make test` once")
    return Path(folders[0]) / "cu13" / "lib"


def hash_of(cubin: Path) -> str:
    with cubin.open("rb") as file:
        code = hashlib.sha256()
        for section in ELFFile(file).iter_sections():
            if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR:
                code.update(section.data())
        return code.hexdigest()[:24]


class Kernel(NamedTuple):
    arch: str
    name: str
    code: str
    registers: int
    spilled_bytes: int


def compiled(chosen: str) -> list[Kernel]:
    """Each kernel, sorted by arch and name."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "FULMEN_KEEP_CUBINS": folder,
               "FULMEN_TEST_NVRTC": str(nvrtc_folder())}  # fmt: skip
        command = [str(PROGRAM), f"--gtest_filter={chosen}"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            print(run.stdout[-4000:] + run.stderr[-1000:], file=sys.stderr)
        kernels = []
        for cubin in Path(folder).glob("*.cubin"):
            arch, name = cubin.stem.split(".", 1)
            registers, spilled = map(int, cubin.with_suffix(".use").read_text("utf-8").split())
            kernels.append(Kernel(arch, name, hash_of(cubin), registers, spilled))
        if run.returncode != 0 or not kernels:
            raise SystemExit(f"{PROGRAM.name} --gtest_filter={chosen} failed or compiled nothing")
        return sorted(kernels)


def kernels_listed(text: str) -> list[Kernel]:
    kernels = []
    for line in text.splitlines():
        if not line.startswith("#"):
            arch, name, code, registers, spilled = line.split()
            kernels.append(Kernel(arch, name, code, int(registers), int(spilled)))
    return kernels


def differences(old: list[Kernel], new: list[Kernel]) -> list[Kernel]:
    """Kernels of `new` whose code no kernel of `old` has, on the same architecture."""
    known = Counter((kernel.arch, kernel.code) for kernel in old)
    changed = []
    for kernel in new:
        if known[kernel.arch, kernel.code] > 0:
            known[kernel.arch, kernel.code] -= 1
        else:
            changed.append(kernel)
    return changed


def cost(before: Kernel | None, after: Kernel) -> str:
    """Registers and spills of a kernel, and of the one of that name in the old list."""
    if before is None:
        return f"{after.registers} registers, {after.spilled_bytes} bytes spilled; not in the list"
    return (f"{before.registers} -> {after.registers} registers, "
            f"{before.spilled_bytes} -> {after.spilled_bytes} bytes spilled")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashes of the kernels' machine code.")
    parser.add_argument("action", choices=["list", "compare"])
    parser.add_argument("words", nargs="*", help="for compare: OLD; then a --gtest_filter")
    arguments = parser.parse_args()
    words = list(arguments.words)
    old_file = Path(words.pop(0)) if arguments.action == "compare" else None
    new = compiled(words[0] if words else "CompileKernels.*")
    if old_file is None:
        nvrtc = version("nvidia-cuda-nvrtc")
        print(
            f"# nvidia-cuda-nvrtc {nvrtc}: arch, name, hash of the code, registers, bytes spilled"
        )
        print("\n".join(" ".join(map(str, kernel)) for kernel in new))
        return 0
    old = kernels_listed(old_file.read_text(encoding="utf-8"))
    of_name = {(kernel.arch, kernel.name): kernel for kernel in old}
    changed = differences(old, new)
    for kernel in changed:
        print(f"other code: {kernel.arch} {kernel.name}:", end=" ")
        print(cost(of_name.get((kernel.arch, kernel.name)), kernel))
    print(f"{len(new) - len(changed)} of {len(new)} kernels have code of the list")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
