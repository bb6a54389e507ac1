# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The programs under tools/ are plain files, not a package: put them where imports find them."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from small_tree import WriteTree  # noqa: E402


@pytest.fixture
def write_tree(tmp_path: Path) -> WriteTree:
    """Writes a small project from {path: text} and returns its root."""

    def write(tree: dict[str, str]) -> Path:
        for name, text in tree.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write
