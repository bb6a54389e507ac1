# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Every named case on every implementation of the backends that are here.

All run in one test, one after the other, so that the oracle computes each case once. A case alone:
pytest tests/cases/test_cases.py -k u35_neg_shift_s704. With FULMEN_EMULATOR set, GPU kernels too.
"""

import os

import pytest

import fulmen
from fulmen.lab.cases import all_cases, emulator, run_case
from fulmen.lab.cases.gpu_arrays import available
from fulmen.options import implementations


@pytest.fixture(scope="module")
def ways():
    """(backend, implementation, arrays)."""
    found = [("cpu", name, "numpy") for name in implementations("cpu")]
    if os.environ.get(emulator.VARIABLE):
        emulator.start()
        found += [("cuda", name, "emulated") for name in implementations("cuda")]
    elif fulmen.gpu_info()["devices"]:
        found += [
            ("cuda", name, arrays) for arrays in available()[:1] for name in implementations("cuda")
        ]
    return found


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_case(case, ways):
    outcomes = {way: run_case(case, *way) for way in ways}
    failed = {way: o.message for way, o in outcomes.items() if o.status == "failed"}
    assert not failed, failed
    skipped = {way: o.message for way, o in outcomes.items() if o.status == "skipped"}
    if skipped:
        pytest.skip(str(skipped))
