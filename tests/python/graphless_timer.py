# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A timer of GPU benches that runs on the CPU."""

from __future__ import annotations

from typing import Any

from fulmen.lab.benchmark import timing


class GraphlessTimer(timing.CpuTimer):
    """Times on the CPU in place of replays."""

    def graphed(self, call: Any, count: int) -> Any:
        assert count == 1  # a second call would find the cache in the L2
        return call

    def host_seconds(self, call: Any, seconds: float) -> float:
        return 1e-6
