# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch examples run as a reader would run them, and the ladder's rungs agree."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import IS_FULL

import fulmen

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ["training/packing.py", "training/planned.py", "distributed/ring_attention.py",
           "training/gpt.py", "huggingface/swap.py"]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS if IS_FULL else SCRIPTS[:4])
def test_runs(script: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def rung(name: str):
    path = EXAMPLES / "ladder" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"ladder_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5), (64, 64), (65, 130), (200, 63)])
def test_the_rungs_agree(sizes: tuple[int, int], causal: bool) -> None:
    q_rows, kv_rows = sizes
    q, k, v = (torch.randn(2, 3, rows, 16) for rows in (q_rows, kv_rows, kv_rows))
    chunked = rung("chunked").attention(q, k, v, causal, chunk=32)
    torch.testing.assert_close(
        chunked, fulmen.attention(q, k, v, causal=causal), atol=1e-5, rtol=1e-5
    )
    if q_rows <= kv_rows or not causal:  # softmax of a row that sees nothing is NaN
        naive = rung("naive").attention(q, k, v, causal)
        torch.testing.assert_close(chunked, naive, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_the_triton_rung() -> None:
    env = {**os.environ}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(EXAMPLES / "ladder" / "triton_forward.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "difference" in done.stdout
