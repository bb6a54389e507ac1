# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a built libfulmen shows to the world: its symbols, what it needs, its size.

Exported are the C ABI (fulmen_*) and the binding (__tvm_ffi_fulmen_*) alone; needed are the C and
C++ run-time libraries alone, and no symbol of a tensor library or driver is left undefined; the
soname has the major version alone; stripped it stays under 6.2 MB. Run by `make test` on the
library that is installed and on the one inside the wheel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_STRIPPED_BYTES = 6_200_000
EXPORTED = re.compile(r"(fulmen_|__tvm_ffi_fulmen_)\w+(@@\w+)?$")
NEEDED = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|ld-linux-\S+)\.so\.\d+"
)
SONAME = re.compile(r"libfulmen(-\w+)?\.so(\.\d+)?")  # auditwheel may add a hash
FOREIGN = re.compile(r"TVMFFI|torch|c10|nvrtc|\bcu[A-Z]|Py[A-Z_]")


def problems(library: Path) -> list[str]:
    """One sentence for each thing that should not be."""
    said = []
    for symbol in _symbols(library, "--defined-only"):
        if not EXPORTED.match(symbol):
            said.append(f"exports {symbol}, which is neither fulmen_* nor __tvm_ffi_fulmen_*")
    for symbol in _symbols(library, "--undefined-only"):
        if FOREIGN.search(symbol):
            said.append(f"leaves {symbol} undefined: it must be looked up at run time")
    for name in _dynamic(library, "NEEDED"):
        if not NEEDED.fullmatch(name):
            said.append(f"needs {name}, which is not a C or C++ run-time library")
    said += [f"has the soname {name}, whose version is not the major one alone"
             for name in _dynamic(library, "SONAME") if not SONAME.fullmatch(name)]  # fmt: skip
    size = stripped_bytes(library)
    if size >= MAX_STRIPPED_BYTES:
        said.append(f"is {size} bytes stripped; the limit is {MAX_STRIPPED_BYTES}")
    return said


def exported(library: Path) -> list[str]:
    return _symbols(library, "--defined-only")


def stripped_bytes(library: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stripped.so"
        _run("strip", "-o", str(copy), str(library))
        return copy.stat().st_size


def _symbols(library: Path, which: str) -> list[str]:
    lines = _run("nm", "-D", which, str(library)).splitlines()
    # A line is "[value] type name"; type A is the absolute name of a symbol version.
    return sorted(line.split()[-1] for line in lines if line.split()[-2] != "A")


def _dynamic(library: Path, entry: str) -> list[str]:
    return re.findall(rf"\({entry}\).*\[(.+)\]", _run("readelf", "-d", str(library)))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    library: Path = parser.parse_args().library
    said = problems(library)
    for sentence in said:
        print(f"{library.name} {sentence}")
    count, size = len(exported(library)), stripped_bytes(library) / 1e6
    print(f"{library.name}: {count} exported symbols, {size:.2f} MB stripped")
    return 1 if said or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
