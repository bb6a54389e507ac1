# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the library for the code blocks is: FULMEN_PREFIX, else build/prefix (`make test`)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from markdown_pages import ROOT

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "pictures")]


@pytest.fixture(scope="session")
def prefix() -> Path:
    folder = Path(os.environ.get("FULMEN_PREFIX", ROOT / "build" / "prefix"))
    header = folder / "include" / "fulmen" / "fulmen.h"
    assert header.is_file(), f"{header} is missing: `make test ONLY=gcc` installs the library there"
    return folder
