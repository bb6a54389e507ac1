# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The oracle's gradients against its own forward pass: central differences, option by option.

In float64 a step of 1e-5 leaves about 1e-9 of the slope; in long double a step of 1e-6 leaves about
1e-12. The loss is sum(o do) + sum(lse dlse) over the rows that see something.
"""

from dataclasses import replace

import numpy as np
import pytest

from fulmen.lab.cases.arithmetic import reference
from fulmen.lab.cases.arrays import HAS_LONG_DOUBLE
from fulmen.lab.cases.oracle import evaluate
from fulmen.lab.cases.visible import Options, Problem
from fulmen.masks import Chunks, Documents, Prefix

RNG = np.random.default_rng(2026)
MASK = RNG.random((2, 1, 5, 6)) < 0.6
OPTIONS = {
    "none": {},
    "scale": {"scale": -0.7},
    "scale_zero": {"scale": 0.0},
    "softcap": {"softcap": 1.5},
    "causal": {"causal": True},
    "top_left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (2, 1)},
    "mask": {"masks": (MASK,)},
    "prefix": {"causal": True, "alignment": "top_left", "masks": (Prefix(3),)},
    "documents": {"masks": (Documents([0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2]),)},
    "chunks": {"masks": (Chunks(3),)},
    "lengths": {"q_lengths": np.array([3, 0]), "kv_lengths": np.array([4, 6])},
    "alibi": {"alibi_slopes": np.array([[0.5, 0.1], [0.2, 0.3]])},
    "bias": {"bias": RNG.standard_normal((2, 2, 5, 6))},
    "bias_rows": {"bias": RNG.standard_normal((2, 1, 5, 1))},
    "bias_keys": {"bias": RNG.standard_normal((6,))},
    "bias_hides": {"bias": np.where(MASK, RNG.standard_normal((2, 1, 5, 6)), -np.inf)},
    "bias_capped": {"bias": RNG.standard_normal((1, 2, 5, 6)), "softcap": 1.0},
    "sinks": {"sinks": np.array([0.3, -2.0])},
    "sinks_causal": {"sinks": np.array([0.3, 4.0]), "causal": True, "alignment": "top_left"},
    "dropout": {"dropout_p": 0.3, "rng": (5, 6)},
    "all": {
        "scale": 0.9,
        "softcap": 2.0,
        "causal": True,
        "window": (4, 0),
        "masks": (MASK,),
        "bias": RNG.standard_normal((1, 2, 1, 6)),
        "alibi_slopes": np.array([0.5, 0.1]),
        "sinks": np.array([0.3, -1.0]),
        "dropout_p": 0.25,
        "rng": (1, 2),
    },
}
PACKED = {
    "packed": {"cu_q": np.array([0, 2, 2, 4]), "cu_kv": np.array([0, 3, 5, 5])},
    "packed_causal_bias": {
        "cu_q": np.array([0, 2, 5]),
        "cu_kv": np.array([0, 1, 6]),
        "causal": True,
        "bias": RNG.standard_normal((2, 3, 5)),
    },
}


def drawn(rng, packed, work):
    """q, k, v, do, dlse: (batch, head, ...) with two heads on one kv_head, or packed."""
    shapes = [(2, 2, 5, 3), (2, 1, 6, 3), (2, 1, 6, 4), (2, 2, 5, 4), (2, 2, 5)]
    shapes = [shape[1:] if packed else shape for shape in shapes]
    return [rng.standard_normal(shape).astype(work) for shape in shapes]


def loss(problem, arithmetic):
    forward = evaluate(replace(problem, do=None), arithmetic)
    lse = np.where(np.isneginf(forward.lse), 0, forward.lse)
    return (forward.o * problem.do).sum() + (lse * problem.dlse).sum()


def moved(problem, name, by):
    """The problem with one parameter moved."""
    if name in ("q", "k", "v"):
        return replace(problem, **{name: getattr(problem, name) + by})
    options = replace(problem.options, **{name: getattr(problem.options, name) + by})
    return replace(problem, options=options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*OPTIONS, *PACKED])
def test_slopes(name, dtype):
    if dtype == "float64" and not HAS_LONG_DOUBLE:
        pytest.skip("long double is no wider than float64 on this machine")
    arithmetic = reference(dtype)
    work = arithmetic.work.type
    step, close = (1e-5, 1e-8) if dtype == "float32" else (1e-6, 1e-11)
    rng = np.random.default_rng(len(name))
    fields = {
        key: value.astype(work) if key in ("bias", "sinks") else value
        for key, value in {**OPTIONS, **PACKED}[name].items()
    }
    options = Options(**fields)
    q, k, v, do, dlse = drawn(rng, name in PACKED, work)
    problem = Problem(q, k, v, options, do, dlse)
    got = evaluate(problem, arithmetic)
    parameters = {"q": got.dq, "k": got.dk, "v": got.dv, "bias": got.dbias, "sinks": got.dsinks}
    for parameter, gradient in parameters.items():
        if gradient is None:
            continue
        direction = rng.standard_normal(gradient.shape).astype(work)
        up, down = (
            loss(moved(problem, parameter, sign * work(step) * direction), arithmetic)
            for sign in (1, -1)
        )
        slope = (up - down) / (2 * work(step))
        assert float((gradient * direction).sum()) == pytest.approx(
            float(slope), rel=close, abs=close
        ), parameter
