# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The machine code of the kernels that the tests compile, as a list of hashes.

It proves that a move or a rename changed no instruction:

    machine_code.py list [FILTER]          compiles; one line a kernel: arch, name, hash
    machine_code.py compare OLD [FILTER]   the same, and what the list in the file OLD lacks

Needs build/release (cuda_kernels_test) and the pinned NVRTC of .venv; FILTER is a --gtest_filter.
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

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from source_tree import ROOT

PROGRAM = ROOT / "build" / "release" / "tests" / "cuda" / "cuda_kernels_test"


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


def compiled(chosen: str) -> list[tuple[str, str, str]]:
    """(arch, name, hash) of each kernel, sorted."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "FULMEN_KEEP_CUBINS": folder,
               "FULMEN_TEST_NVRTC": str(nvrtc_folder())}  # fmt: skip
        command = [str(PROGRAM), f"--gtest_filter={chosen}"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise SystemExit(run.stdout[-4000:] + run.stderr[-1000:])
        kernels = []
        for cubin in Path(folder).iterdir():
            arch, name = cubin.name.removesuffix(".cubin").split(".", 1)
            kernels.append((arch, name, hash_of(cubin)))
        return sorted(kernels)


def kernels_listed(text: str) -> list[tuple[str, str, str]]:
    kernels = []
    for line in text.splitlines():
        if not line.startswith("#"):
            arch, name, code = line.split()
            kernels.append((arch, name, code))
    return kernels


def differences(
    old: list[tuple[str, str, str]], new: list[tuple[str, str, str]]
) -> list[tuple[str, str, str]]:
    """Kernels of `new` whose code no kernel of `old` has, on the same architecture."""
    known = Counter((arch, code) for arch, _, code in old)
    changed = []
    for arch, name, code in new:
        if known[arch, code] > 0:
            known[arch, code] -= 1
        else:
            changed.append((arch, name, code))
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashes of the kernels' machine code.")
    parser.add_argument("action", choices=["list", "compare"])
    parser.add_argument("words", nargs="*", help="for compare: OLD; then a --gtest_filter")
    arguments = parser.parse_args()
    words = list(arguments.words)
    old_file = Path(words.pop(0)) if arguments.action == "compare" else None
    new = compiled(words[0] if words else "CompileKernels.*")
    if old_file is None:
        print(f"# nvidia-cuda-nvrtc {version('nvidia-cuda-nvrtc')}: arch, name, hash of the code")
        print("\n".join(" ".join(kernel) for kernel in new))
        return 0
    changed = differences(kernels_listed(old_file.read_text(encoding="utf-8")), new)
    for arch, name, _ in changed:
        print(f"other code: {arch} {name}")
    print(f"{len(new) - len(changed)} of {len(new)} kernels have code of the list")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
