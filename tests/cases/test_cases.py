# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Every named case on the scalar and on the tiled implementation.

Both run in one test, one after the other, so that the oracle computes each case once. A case alone:
pytest tests/cases/test_cases.py -k u35_neg_shift_s704
"""

import pytest

from fulmen.cases import all_cases, run_case


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_case(case):
    outcomes = {name: run_case(case, "cpu", name) for name in ("scalar", "tiled")}
    failed = {name: o.message for name, o in outcomes.items() if o.status == "failed"}
    assert not failed, failed
    skipped = {name: o.message for name, o in outcomes.items() if o.status == "skipped"}
    if skipped:
        pytest.skip(str(skipped))
