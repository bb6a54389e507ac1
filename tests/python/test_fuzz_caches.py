# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of caches, for a few seconds from a fixed seed; and that it sees faults.

`python tests/python/fuzz_caches.py` goes on for longer, from a new seed.
"""

from __future__ import annotations

import os
from typing import Any

import fuzz_caches
import numpy as np
import pytest

from fulmen.options import implementations

STEPS = 10_000 if os.environ.get("FULMEN_TEST_FULL") else 300


def test_a_server_gets_the_numbers_of_contiguous_keys() -> None:
    assert fuzz_caches.faults(20, STEPS, "numpy", "auto") == []


@pytest.mark.parametrize("implementation", implementations("cpu"))
def test_each_implementation_that_takes_caches(implementation: str) -> None:
    try:
        assert fuzz_caches.faults(7, 60, "numpy", implementation) == []
    except fuzz_caches.fulmen.UnsupportedError as gap:
        pytest.skip(str(gap))


def test_it_sees_a_page_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    table = fuzz_caches.World.table

    def wrong(self: Any, chosen: Any, kind: Any) -> dict[str, Any]:
        found = table(self, chosen, kind)
        first = found["page_table"].reshape(-1)
        if found["page_table"].ndim == 2 and len(first):
            first[0] = np.argmin(self.users)  # a page that nobody has: NaN
        return found

    monkeypatch.setattr(fuzz_caches.World, "table", wrong)
    # Shared pages are compared by the call itself.
    monkeypatch.setattr(fuzz_caches.World, "shared", lambda self, chosen: 0)
    assert any("FAULT" in said for said in fuzz_caches.faults(20, 120, "numpy", "auto"))


def test_it_sees_a_wrong_value_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = fuzz_caches.World.stored

    def wrong(self: Any, x: Any, scale: Any) -> Any:
        numbers, values = stored(self, x, scale)
        return numbers, 1.5 * values

    monkeypatch.setattr(fuzz_caches.World, "stored", wrong)
    assert any("FAULT" in said for said in fuzz_caches.faults(20, 300, "numpy", "auto"))
