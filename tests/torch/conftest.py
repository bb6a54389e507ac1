# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the PyTorch layer; without torch they are skipped with one line.

FULMEN_TEST_FULL=1 runs what takes longer: every sample, every model, the inductor.
"""

from __future__ import annotations

import os

import pytest

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

IS_FULL = os.environ.get("FULMEN_TEST_FULL", "") not in ("", "0")
collect_ignore_glob = [] if torch is not None else ["test_*.py"]

full = pytest.mark.skipif(not IS_FULL, reason="FULMEN_TEST_FULL=1 runs it")


def pytest_report_header() -> str:
    return f"torch {torch.__version__}" if torch is not None else "tests/torch skipped: no torch"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
