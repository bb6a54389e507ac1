# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Lists of machine code are compared by code and architecture, not by names."""

from __future__ import annotations

import machine_code
from machine_code import Kernel

OLD = "# compiler 1\nsm_80 a 11 128 0\nsm_80 b 22 255 16\nsm_90a a 33 168 0\n"


def test_a_renamed_kernel_is_the_same() -> None:
    old = machine_code.kernels_listed(OLD)
    assert len(old) == 3
    new = [Kernel("sm_80", "c", "22", 255, 16), Kernel("sm_90a", "a", "33", 168, 0)]
    assert machine_code.differences(old, new) == []


def test_other_code_and_a_second_kernel_of_one_code_are_found() -> None:
    old = machine_code.kernels_listed(OLD)
    changed = Kernel("sm_80", "b", "33", 255, 16)  # the code of another architecture
    twice = Kernel("sm_80", "d", "11", 128, 0)
    new = [Kernel("sm_80", "a", "11", 128, 0), changed, twice]
    assert machine_code.differences(old, new) == [changed, twice]


def test_registers_and_spills_stand_beside_those_of_the_list() -> None:
    before = machine_code.kernels_listed(OLD)[1]
    after = Kernel("sm_80", "b", "44", 254, 0)
    assert machine_code.cost(before, after) == "255 -> 254 registers, 16 -> 0 bytes spilled"
    assert machine_code.cost(None, after) == "254 registers, 0 bytes spilled; not in the list"
