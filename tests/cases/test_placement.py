# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Cases on copies of their arrays: strides, gaps and alignment survive, and what is written shows.

The copies lie in other host memory here, so that no GPU is needed; the owner of GPU memory is
replaced by one of NumPy.
"""

from contextlib import nullcontext

import numpy as np
import pytest

import fulmen
from fulmen.lab.cases import find, run, run_case
from fulmen.lab.cases.arrays import same_bits
from fulmen.lab.cases.placement import ALIGNMENT, OnGpu, address, root
from fulmen.lab.cases.views import VIEWS


class Mirror:
    """NumPy memory that begins at a multiple of ALIGNMENT, as that of a GPU does."""

    name = "mirror"
    has_strides = True

    def __init__(self):
        self.calls = 0

    def stream(self):
        self.calls += 1
        return nullcontext()

    def bytes(self, x, first):
        memory = np.full(first + x.nbytes + ALIGNMENT, 0xFF, np.uint8)
        memory = memory[-address(memory) % ALIGNMENT :][: first + x.nbytes]
        memory[first:] = x
        return memory

    def view(self, memory, offset, like):
        return np.ndarray(like.shape, like.dtype, memory, offset, like.strides)

    def contiguous(self, x):
        return np.array(x, order="C")

    def scattered(self, x):
        return x.copy()

    def get(self, x):
        return np.array(x)


@pytest.fixture
def mirror(monkeypatch):
    owner = Mirror()
    monkeypatch.setattr(run, "_memory", lambda arrays: OnGpu(owner))
    return owner


@pytest.mark.parametrize("view", [name for name in VIEWS if not name.startswith("far")])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_copy_has_the_numbers_strides_and_alignment(view, dtype):
    x = VIEWS[view](np.arange(120).reshape(2, 3, 4, 5).astype(dtype))
    place = OnGpu(Mirror())
    copy = place.put(x)
    assert root(copy) is not root(x)
    assert same_bits(np.array(copy), np.array(x))
    assert copy.strides == x.strides
    assert address(copy) % ALIGNMENT == address(x) % ALIGNMENT
    assert place.put(x[1:]).base is not None
    assert root(place.put(x[1:])) is root(copy)  # one copy of one memory
    assert place.modified() == ""


def test_cases_pass_on_copies(mirror):
    names = ("view_*16", "u21_*", "u30_*", "u55_*", "u110_*", "decode_k3?", "u84_*", "u52_*")
    cases = [case for case in find(*names) if not any("far" in view for _, view in case.views)]
    assert len(cases) > 10
    for case in cases:
        outcome = run_case(case, "cpu", "tiled", "mirror")
        assert outcome.status == "passed", (case.name, outcome.message)
    assert mirror.calls > len(cases)


def broken(monkeypatch, mistake):
    """fulmen.attention_forward with a mistake that sees the arrays of the call."""
    real = fulmen.attention_forward

    def forward(q, k, v, out=None, **options):
        returned = real(q, k, v, out=out, **options)
        mistake(q, out)
        return returned

    monkeypatch.setattr(fulmen, "attention_forward", forward)


def test_a_write_to_a_copy_of_an_input_shows(mirror, monkeypatch):
    def write_behind_q(q, out):
        memory = root(q)
        memory[address(q) - address(memory) - 1] ^= 1

    broken(monkeypatch, write_behind_q)
    (case,) = find("view_gapped_q_float32")
    outcome = run_case(case, "cpu", "tiled", "mirror")
    assert outcome.status == "failed"
    assert "was written to" in outcome.message


def test_a_write_around_the_output_shows(mirror, monkeypatch):
    def write_around(q, out):
        if out is not None:
            root(out)[: 2 * ALIGNMENT] = 0

    broken(monkeypatch, write_around)
    (case,) = find("u21_guarded_outputs")
    outcome = run_case(case, "cpu", "tiled", "mirror")
    assert outcome.status == "failed"
    assert "around the caller's output" in outcome.message
