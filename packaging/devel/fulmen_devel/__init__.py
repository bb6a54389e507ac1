# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the headers, the CMake package and the libraries of fulmen for C and C++ lie.

`python -m fulmen --cmake-dir` and `--include-dir` print these.
"""

from pathlib import Path

__all__ = ["cmake_dir", "include_dir"]

_HERE = Path(__file__).resolve().parent


def include_dir() -> str:
    """The folder that holds fulmen/fulmen.h: for -I."""
    return str(_HERE / "include")


def cmake_dir() -> str:
    """The folder of fulmenConfig.cmake: for -Dfulmen_DIR=."""
    return str(_HERE / "lib" / "cmake" / "fulmen")
