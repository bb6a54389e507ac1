# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Named cases, the NumPy oracle and the error rule: what every implementation is judged by.

    from fulmen.lab.cases import find, run_case
    for case in find("u35_*"):
        print(case.name, run_case(case, implementation="tiled"))

Reading order: case (what a case says), visible and oracle (what attention means), arithmetic,
magnitude and error_rule (how much error is fair), problem (from a case to arrays), run, catalogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .case import Case
from .run import Outcome, run_case

if TYPE_CHECKING:
    from .catalogue import all_cases, find

__all__ = ["Case", "Outcome", "all_cases", "find", "run_case"]


def __getattr__(name: str) -> Any:
    """The catalogue takes a second to make: it comes when it is asked for."""
    if name in ("all_cases", "find"):
        from . import catalogue

        return getattr(catalogue, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
