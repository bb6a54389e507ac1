# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_library sees a foreign export, need or undefined symbol, and a fat file."""

import subprocess
from pathlib import Path

import pytest

import check_library

GOOD = "int fulmen_version(void) { return 1; } int __tvm_ffi_fulmen_call(void) { return 2; }\n"


def build(folder: Path, text: str, *options: str) -> Path:
    source, library = folder / "a.c", folder / "libfulmen.so"
    source.write_text(text)
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(library), *options]
    subprocess.run(command, check=True, cwd=folder)
    return library


def test_a_clean_library_passes(tmp_path: Path) -> None:
    library = build(tmp_path, GOOD, "-lm")
    assert check_library.problems(library) == []
    assert check_library.exported(library) == ["__tvm_ffi_fulmen_call", "fulmen_version"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int helper(void) { return 1; }", "exports helper"),
        ("int xfulmen_a(void) { return 1; }", "exports xfulmen_a"),
        (
            "int cuInit(int); int fulmen_a(void) { return cuInit(0); }",
            "leaves cuInit undefined",
        ),
        ("int TVMFFIErrorSet(void); int fulmen_a(void) { return TVMFFIErrorSet(); }", "undefined"),
        (
            f"const char fulmen_fat[{check_library.MAX_STRIPPED_BYTES}] = {{1}};",
            "the limit is",
        ),
    ],
)
def test_each_fault_is_seen(text: str, said: str, tmp_path: Path) -> None:
    found = check_library.problems(build(tmp_path, text + "\n"))
    assert len(found) == 1
    assert said in found[0]


def test_a_foreign_library_is_seen(tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(other)], check=True
    )
    library = build(tmp_path, GOOD, "-Wl,--no-as-needed", f"-L{tmp_path}", "-lother")
    assert check_library.problems(library) == [
        "needs libother.so, which is not a C or C++ run-time library"
    ]


def test_a_soname_with_a_minor_version_is_seen(tmp_path: Path) -> None:
    assert check_library.problems(build(tmp_path, GOOD, "-Wl,-soname,libfulmen.so.0")) == []
    found = check_library.problems(build(tmp_path, GOOD, "-Wl,-soname,libfulmen.so.0.1"))
    assert found == ["has the soname libfulmen.so.0.1, whose version is not the major one alone"]
