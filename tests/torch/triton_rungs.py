# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Judges the Triton rungs of examples/ladder in Triton's interpreter: a line of JSON a result.

triton_rungs.py Q_ROWS,KV_ROWS ...    a process of its own: Triton decides when it is imported

The interpreter multiplies bfloat16 as integers, so that float16 stands for the types of 16 bits.

Called by test_examples.py.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.visible import Options, Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "ladder"))
import triton_backward

DTYPES = {torch.float32: np.dtype("float32"), torch.float16: np.dtype("float16")}


def judged(q_rows: int, kv_rows: int, causal: bool, dtype: torch.dtype) -> None:
    """Prints how o and the gradients of drawn inputs compare with float64, by the error rule."""
    shapes = [(2, 2, rows, 16) for rows in (q_rows, kv_rows, kv_rows, q_rows)]
    q, k, v, do = (torch.randn(shape).to(dtype) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = triton_backward.attention(*inputs, causal)
    found = {"o": o, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, do)))}
    here = [x.detach().float().numpy() for x in (q, k, v, do)]
    oracle = consult(Problem(*here[:3], Options(causal=causal), do=here[3]), DTYPES[dtype].name)
    for name, x in found.items():
        verdict = judge(name, x.detach().float().numpy().astype(DTYPES[dtype]), oracle)
        line = json.dumps({
            "what": f"{name} {q_rows} x {kv_rows} {'causal' if causal else 'full'} {dtype}",
            "passed": verdict.passed, "message": verdict.message,
        })  # fmt: skip
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    for sizes, causal, dtype in product(sys.argv[1:], (False, True), DTYPES):
        judged(*map(int, sizes.split(",")), causal, dtype)
