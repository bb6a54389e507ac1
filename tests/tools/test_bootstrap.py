# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""bootstrap.sh names in one line what is missing, or installs it where the user may."""

import shutil
import subprocess
from pathlib import Path

import pytest
from small_tree import ROOT

NEEDED = ["bash", "dirname", "env", "seq", "cut", "cmp", "cp"]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A project with nothing but bootstrap.sh, and a PATH with nothing but a shell's tools."""
    (tmp_path / "tools").mkdir()
    for name in ("bootstrap.sh", "find_clang.sh", "requirements.txt", "requirements-docs.txt"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    (tmp_path / "bin").mkdir()
    for name in NEEDED:
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    program(tmp_path, "id", "echo 1000")
    return tmp_path


def program(root: Path, name: str, body: str) -> None:
    path = root / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def bootstrap(root: Path, purpose: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "tools/bootstrap.sh", purpose]
    environment = {"PATH": str(root / "bin")}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def test_what_is_missing_is_named_in_one_line(bare: Path) -> None:
    done = bootstrap(bare, "run")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "fulmen needs python3 python3-venv g++ (names of Debian packages): please install and run "
        "again.\n"
    )
    for_tests = bootstrap(bare, "test").stderr
    assert for_tests.count("\n") == 1
    assert "python3 python3-venv g++ gcc libgtest-dev libgmock-dev clang-16" in for_tests


def test_the_documentation_needs_no_compiler_and_its_own_list_alone(bare: Path) -> None:
    assert "fulmen needs python3 python3-venv (names" in bootstrap(bare, "docs").stderr
    (bare / ".venv" / "bin").mkdir(parents=True)
    program(bare, "python3", "exit 0")
    shutil.copy(bare / "bin" / "python3", bare / ".venv" / "bin" / "python")
    (bare / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\necho "$@" >> {bare}/pip.log\n')
    for _ in range(2):  # the second time there is nothing left to do
        assert bootstrap(bare, "docs").returncode == 0
    installed = [line for line in (bare / "pip.log").read_text().splitlines() if "install" in line]
    assert [line.split()[-1] for line in installed] == ["tools/requirements-docs.txt"]


def test_a_python_without_venv_is_seen(bare: Path) -> None:
    program(bare, "g++", "exit 0")
    program(bare, "python3", "exit 1")
    assert "fulmen needs python3-venv " in bootstrap(bare, "run").stderr


def test_root_installs_what_is_missing(bare: Path) -> None:
    program(bare, "id", "echo 0")
    program(bare, "apt-get", f'echo "$@" >> {bare}/apt.log')
    program(bare, "g++", "exit 0")
    program(
        bare, "python3", f'case "$*" in *venv*.venv) echo "$@" >> {bare}/apt.log;; esac; exit 1'
    )
    done = bootstrap(bare, "run")
    assert done.stdout == "installing system packages: python3-venv\n"
    assert (bare / "apt.log").read_text().splitlines() == [
        "update -qq",
        "install -y -qq --no-install-recommends python3-venv",
        "-m venv --clear .venv",
    ]


def test_passwordless_sudo_is_used(bare: Path) -> None:
    program(bare, "apt-get", "exit 0")
    program(bare, "sudo", f'printf "%s\\n" "$*" >> {bare}/sudo.log')
    program(bare, "python3", "exit 0")
    bootstrap(bare, "run")
    asked, updated, installed = (bare / "sudo.log").read_text().splitlines()
    assert asked == "-n true"
    assert updated.endswith("apt-get update -qq")
    assert installed.endswith("apt-get install -y -qq --no-install-recommends g++")


def test_what_aarch64_needs_is_installed_where_it_may_be_and_never_asked_for(bare: Path) -> None:
    assert "aarch64" not in bootstrap(bare, "test-full").stderr
    program(bare, "id", "echo 0")
    program(bare, "apt-get", "exit 0")
    said = bootstrap(bare, "test-full").stdout.splitlines()[0]
    assert said.startswith("installing system packages: python3 ")
    assert said.endswith(" g++-aarch64-linux-gnu qemu-user-static")
    assert "aarch64" not in bootstrap(bare, "test").stdout
