# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the pages about PyTorch run; docstrings of fulmen.compat too.

What tools/docs_tables.py quotes from examples into pages is run by test_examples.py.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\{\.python notest\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {name: (ROOT / "docs/en" / name).read_text() for name in ("pytorch.md", "migration.md")}
BLOCKS = [(name, code) for name, text in PAGES.items() for code in BLOCK.findall(text)]


@pytest.mark.parametrize(
    ("page", "code"), BLOCKS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BLOCKS)]
)
def test_blocks_run(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {})  # in a namespace of its own


@pytest.mark.parametrize("name", ["sdpa", "flash_attn"])
def test_docstrings_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"fulmen.compat.{name}"))
    assert found.failed == 0
    assert found.attempted > 0
