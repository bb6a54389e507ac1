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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case
    from .catalogue import all_cases, find
    from .error_rule import judge
    from .run import Outcome, gpu_bytes, results, run_case

__all__ = ["Case", "Outcome", "all_cases", "find", "gpu_bytes", "judge", "results", "run_case"]

_MODULES = {
    "Case": "case", "Outcome": "run", "all_cases": "catalogue", "find": "catalogue",
    "gpu_bytes": "run", "judge": "error_rule", "results": "run", "run_case": "run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name from its module; the catalogue takes a second to make: it comes when asked for."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
