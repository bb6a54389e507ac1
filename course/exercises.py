# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of exercises in Python need: a function out of a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_of(path: Path, name: str) -> Callable[..., Any]:
    """A function of the file, read anew.

    Raises:
        NotImplementedError: the file has none of this name.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise NotImplementedError(name)
    found: Callable[..., Any] = getattr(module, name)
    return found
