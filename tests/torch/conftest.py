# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the PyTorch layer; without torch they are skipped with one line."""

from __future__ import annotations

import pytest

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

collect_ignore_glob = [] if torch is not None else ["test_*.py"]


def pytest_report_header() -> str:
    return f"torch {torch.__version__}" if torch is not None else "tests/torch skipped: no torch"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
