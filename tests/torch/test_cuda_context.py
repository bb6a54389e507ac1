# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over NCCL between two GPUs: what bench/context_parallel.py checks.

Skipped with fewer than two. Every schedule, layout and mask, o and gradients, against one GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two NVIDIA GPUs")
BENCH = Path(__file__).parents[2] / "bench" / "context_parallel.py"


def test_two_gpus_give_the_results_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--rows", "--seconds", "300", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-context-*.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    checks = [record for record in records if record["op"] != "link"]
    assert len(checks) == 8 * 2 * 3
    assert {check["op"] for check in checks} == {"check"}
    wrong = [check for check in checks if not check["max_error"] < 0.02]
    assert wrong == []
