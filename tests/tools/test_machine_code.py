# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of machine code are compared by code and architecture, not by names."""

from __future__ import annotations

import machine_code

OLD = "# compiler 1\nsm_80 a 11\nsm_80 b 22\nsm_90a a 33\n"


def test_a_renamed_kernel_is_the_same() -> None:
    old = machine_code.kernels_listed(OLD)
    assert len(old) == 3
    assert machine_code.differences(old, [("sm_80", "c", "22"), ("sm_90a", "a", "33")]) == []


def test_other_code_and_a_second_kernel_of_one_code_are_found() -> None:
    old = machine_code.kernels_listed(OLD)
    changed = ("sm_80", "b", "33")  # the code of another architecture
    twice = ("sm_80", "d", "11")
    assert machine_code.differences(old, [("sm_80", "a", "11"), changed, twice]) == [changed, twice]
