# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of what a score reads, by what the index of a read depends on.

One text reads an array by nothing but the head, by the row, by the key, by their distance and by
both, with derivatives that need the score; kernels of 16 bits against the oracle in float64. On a
GPU, or in the emulator (a kernel is compiled there for each dtype and dim: one without
FULMEN_TEST_FULL).
"""

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen.lab.cases import emulator
from fulmen.lab.cases.arrays import dtype_of
from fulmen.lab.cases.gpu_arrays import placed

TEXT = (
    "let near = clamp(j - p, -9, 70) + 9;"
    "s * heat[h] + table[h, near] + 0.25 * s * row[b, i] + key[hk, j] * row[b, i]"
    " + both[i // 8, j // 8]"
)
SHAPES = {
    "tiles": {"q_rows": 141, "kv_rows": 203},
    "more_rows": {"q_rows": 130, "kv_rows": 70},
    "causal": {"q_rows": 200, "kv_rows": 200, "causal": True},
    "window": {"q_rows": 77, "kv_rows": 250, "window": (40, 60)},
    "own_mask": {"q_rows": 150, "kv_rows": 270, "mask": "(p - j) % 5 != 2 and j <= p"},
    "dropout": {"q_rows": 66, "kv_rows": 131, "dropout_p": 0.25, "rng": (5, 6)},
}
WAYS = [("bfloat16", 64, "tiles")]
if os.environ.get("FULMEN_TEST_FULL") or not os.environ.get(emulator.VARIABLE):
    WAYS += [("float16", 64, "tiles"), ("bfloat16", 128, "more_rows"), ("bfloat16", 256, "tiles")]
    WAYS += [("bfloat16", 64, name) for name in SHAPES if name != "tiles"]


def arrays() -> str:
    if os.path.isfile(os.environ.get(emulator.VARIABLE, "")):
        emulator.start()
        return "emulated"
    if importlib.util.find_spec("torch") is not None and fulmen.gpu_info()["devices"]:
        return "torch"
    pytest.skip("no GPU, and FULMEN_EMULATOR names no emulator")


def captures(rng: np.random.Generator, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    rows, keys = shape["q_rows"], shape["kv_rows"]
    return {
        "heat": 0.5 + rng.random(2), "table": rng.standard_normal((2, 80)),
        "row": rng.standard_normal((2, rows)), "key": rng.standard_normal((1, keys)),
        "both": rng.standard_normal((-(-rows // 8), -(-keys // 8))),
    }  # fmt: skip


@pytest.mark.parametrize("implementation", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize(("dtype", "dim", "name"), WAYS)
def test_gradients_of_what_is_read(dtype: str, dim: int, name: str, implementation: str) -> None:
    place = placed(arrays())
    shape = SHAPES[name]
    rng = np.random.default_rng(3)
    kind = dtype_of(dtype)
    sizes = [(2, 2, shape["q_rows"], dim), *[(2, 1, shape["kv_rows"], dim)] * 2]
    q, k, v = (rng.standard_normal(size).astype(kind) for size in sizes)
    do = rng.standard_normal(q.shape).astype(kind)
    read = {name: x.astype(np.float32) for name, x in captures(rng, shape).items()}
    text = TEXT
    options = {x: y for x, y in shape.items() if x not in ("q_rows", "kv_rows")}
    need = ("q", "k", "v", *read)
    score = fulmen.score(text, **read)
    where: dict[str, Any] = {"backend": "cuda", "implementation": implementation}
    forward = place.attention_forward(q, k, v, score=score, **where, **options)
    found = place.attention_backward(
        do, q, k, v, forward.o, forward.stats, need=need, score=score, **where, **options
    )
    wide = [x.astype(np.float64) for x in (do, q, k, v)]
    score = fulmen.score(text, **{name: x.astype(np.float64) for name, x in read.items()})
    exact = fulmen.attention_forward(*wide[1:], score=score, **options)
    wanted = fulmen.attention_backward(
        *wide, exact.o, exact.stats, need=need, score=score, **options
    )
    assert wanted.dcaptures is not None
    unit = 2.0 ** (-8 if dtype == "bfloat16" else -11)  # of o, of which delta is made
    for name, x in wanted.dcaptures.items():
        error = np.linalg.norm(found.dcaptures[name] - x) / np.linalg.norm(x)
        assert error <= 4 * unit, (name, error)
