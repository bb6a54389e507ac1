# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Small projects for the checks to look at."""

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPDX = "// SPDX-FileCopyrightText: fulmen contributors\n// SPDX-License-Identifier: Apache-2.0\n"

WriteTree = Callable[[dict[str, str]], Path]
