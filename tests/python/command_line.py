# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The program `fulmen` in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def program(*arguments: Any, **environment: str) -> Any:
    """The program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fulmen", *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
