# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of the Python interface, for a few seconds from fixed seeds; and that it sees faults.

`python tests/python/fuzz_calls.py --seconds 600` goes on for longer, from a new seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz_calls
import numpy as np
import pytest

CALLS = 200_000 if os.environ.get("FULMEN_TEST_FULL") else 1_500


def test_only_errors_of_fulmen_come_out(tmp_path: Path) -> None:
    """In a process of its own, so that its death is seen."""
    script = Path(fuzz_calls.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--seed", "19", "--calls", str(CALLS)],
        env={**os.environ, "FULMEN_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith(f"{CALLS} calls, 0 faults\n")


def _key_error(**_: Any) -> None:
    raise KeyError("q")


def _writes(q: Any = None, **_: Any) -> None:
    if isinstance(q, np.ndarray) and q.flags.writeable and q.dtype == np.float32:
        q[...] = 3


@pytest.mark.parametrize(
    ("planted", "said"), [(_key_error, "KeyError"), (_writes, "q was written")]
)
def test_it_sees_what_is_planted(planted: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fuzz_calls.FUNCTIONS:
        monkeypatch.setitem(fuzz_calls.FUNCTIONS, name, planted)
    assert any(said in fuzz_calls.fault(0, number) for number in range(100))
