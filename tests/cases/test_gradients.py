# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the kernels themselves, option by option, without the oracle.

In float64 the slope of an implementation's own forward pass along a random direction is the
product of its gradients with the direction; and the tensor cores' gradients of 16-bit inputs are
those of simt to within their rounding. On the CPU, and on a GPU (or the emulator) where one is.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

import fulmen
from fulmen.lab.cases import checks, emulator
from fulmen.lab.cases.case import Case
from fulmen.lab.cases.checks import Run
from fulmen.lab.cases.gpu_arrays import placed
from fulmen.lab.cases.placement import Host
from fulmen.lab.cases.problem import build_call, build_problem

STEP = 1e-5
OPTIONS = {
    "none": {},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "causal": {"causal": True},
    "window": {"window": (4, 2)},
    "mask": {"masks": (("bool", "11qk", 0.6),)},
    "prefix": {"causal": True, "masks": (("prefix", 5),)},
    "documents": {"masks": (("documents", 4),)},
    "chunks": {"masks": (("chunks", 6),)},
    "lengths": {"q_lengths": (13, 0), "kv_lengths": (4, 19)},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "bhqk"},
    "bias_broadcast": {"bias": "11qk", "softcap": 2.0},
    "sinks": {"sinks": "normal", "dlse": True},
    "dlse": {"dlse": True},
    "dropout": {"dropout_p": 0.3, "rng": (5, 6)},
    "packed": {"q_packed": (7, 0, 12), "kv_packed": (9, 3, 8), "causal": True},
    "values_narrower": {"dim_v": 5},
}


@lru_cache(maxsize=1)
def gpu_arrays() -> str:
    """Whose arrays lie on a GPU here; "" without one."""
    if os.path.isfile(os.environ.get(emulator.VARIABLE, "")):
        emulator.start()
        return "emulated"
    if importlib.util.find_spec("torch") is not None and fulmen.gpu_info()["devices"]:
        return "torch"
    return ""


def case_of(name: str, dtype: str) -> Case:
    shape = {"batch": 2, "heads": 2, "kv_heads": 1, "q_rows": 17, "kv_rows": 19, "dim": 8}
    return Case(name, dtype=dtype, **{**shape, **OPTIONS[name]})


def run_of(case: Case, problem, implementation: str) -> Run:
    if implementation == "scalar":
        where, place = {"backend": "cpu"}, Host()
    elif not gpu_arrays():
        pytest.skip("no GPU, and FULMEN_EMULATOR names no emulator")
    else:
        where, place = {"backend": "cuda"}, placed(gpu_arrays())
    where = {**where, "implementation": implementation}
    return Run(case, problem, build_call(case, problem), where, place)


def gradients(run: Run) -> dict[str, np.ndarray]:
    found = run.backward(run.forward(), run.case.needs)
    return {name: checks.head_major(name, x, run.case.packed) for name, x in found.items()}


def loss(run: Run) -> float:
    """What the gradients of a run are those of."""
    case, problem, forward = run.case, run.problem, run.forward()
    sum_o = (checks.head_major("o", forward.o, case.packed) * problem.do).sum()
    if problem.dlse is None:
        return float(sum_o)
    lse = checks.head_major("lse", forward.lse, case.packed)
    return float(sum_o + (np.where(np.isneginf(lse), 0, lse) * problem.dlse).sum())


def moved(problem, name: str, direction: np.ndarray):
    """The problem with one parameter further along a direction."""
    if hasattr(problem, name):
        return replace(problem, **{name: getattr(problem, name) + direction})
    options = problem.options
    return replace(problem, options=replace(options, **{name: getattr(options, name) + direction}))


@pytest.mark.parametrize("implementation", ["scalar", "simt"])
@pytest.mark.parametrize("name", OPTIONS)
def test_slopes_of_the_forward_pass(name, implementation):
    case = case_of(name, "float64")
    problem = build_problem(case)
    rng = np.random.default_rng(1)
    for gradient, slopes in gradients(run_of(case, problem, implementation)).items():
        parameter = gradient.removeprefix("d")
        direction = rng.standard_normal(slopes.shape)
        ends = [
            loss(run_of(case, moved(problem, parameter, step * direction), implementation))
            for step in (STEP, -STEP)
        ]
        measured = (ends[0] - ends[1]) / (2 * STEP)
        size = np.abs(slopes * direction).sum()
        assert abs(measured - (slopes * direction).sum()) <= 1e-7 * size, (gradient, measured)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tensor_cores_agree_with_simt(name, dtype):
    if gpu_arrays() == "emulated" and not os.environ.get("FULMEN_TEST_FULL"):
        pytest.skip("compiles a large kernel for each option: minutes")
    case = case_of(name, dtype)
    problem = build_problem(case)
    expected = gradients(run_of(case, problem, "simt"))
    actual = gradients(run_of(case, problem, "sm80"))
    unit = 2.0 ** (-8 if dtype == "bfloat16" else -11)  # rounding of P, dS and the results
    for gradient, of_simt in expected.items():
        size = np.linalg.norm(of_simt.astype(np.float64))
        error = np.linalg.norm(of_simt.astype(np.float64) - actual[gradient].astype(np.float64))
        assert error <= 4 * unit * size, (gradient, error / size)
