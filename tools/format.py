# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Formats the project's files, or with --check says which are not: clang-format and ruff format."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from check_layers import CPP_SUFFIXES
from source_tree import ROOT, files

BIN = Path(sys.executable).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail if not formatted"
    )
    check = parser.parse_args().check
    cpp = [str(path) for path in files(ROOT, CPP_SUFFIXES)]
    clang_format = [str(BIN / "clang-format"), *(["--dry-run", "--Werror"] if check else ["-i"])]
    ruff = [str(BIN / "ruff"), "format", *(["--check"] if check else [])]
    commands = [[*clang_format, *cpp], [*ruff, "."]]
    results = [subprocess.run(command, cwd=ROOT, check=False) for command in commands]
    return max(result.returncode for result in results)


if __name__ == "__main__":
    sys.exit(main())
