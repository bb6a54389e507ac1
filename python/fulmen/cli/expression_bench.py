# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The grid `expressions` of `fulmen bench`: scores and masks of a caller's own as texts and as
options beside FlexAttention, each cell among plain calls of the same shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from fulmen.lab.benchmark.expression_cells import as_option, as_text
from fulmen.lab.benchmark.expression_sides import (
    ExpressionTruth,
    FlexExpression,
    FulmenExpression,
    random_captures,
)
from fulmen.lab.benchmark.loading import MissingError
from fulmen.lab.benchmark.records import figure
from fulmen.lab.benchmark.sides import Side
from fulmen.lab.benchmark.timing import Times
from fulmen.options import implementations

from .benches import Benches, error_text

PEERS: dict[str, Callable[[], Side]] = {
    "flex": FlexExpression,
    "flex-flash": lambda: FlexExpression("flex-flash", "FLASH"),
}
PLAIN = "a plain call"


class ExpressionBench(Benches):
    """Texts, options and FlexAttention's functions."""

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(PEERS)

    def ours(self, arguments: argparse.Namespace) -> list[Any]:
        known = ("auto", *implementations(self.backend))
        asked = [x for x in arguments.implementation or ["auto"] if x in known]
        ways = (("fulmen", as_text), ("fulmen option", as_option))
        return [FulmenExpression(x, *way) for x in asked for way in ways]

    def peer(self, name: str, fa3_path: str | None) -> Side:
        if name not in PEERS:
            raise MissingError(f"scores and masks of one's own are timed beside {', '.join(PEERS)}")
        return PEERS[name]()

    def compile(self, cells: Sequence[Any]) -> None:
        """Nothing: a cell's first calls compile, and kernels are kept on disk."""

    def inputs(self, cell: Any) -> tuple[Any, Any]:
        with suppress(AttributeError):  # torch of no compiler
            self.torch._dynamo.reset()  # functions of earlier cells would be looked through
        captures = random_captures(cell, self.torch, self.device)
        self.plain = FulmenExpression("auto", PLAIN, lambda *_: {}).answer(cell, captures).call
        return captures, ExpressionTruth(cell, captures, self.torch)

    def ceilings(self, cell: Any) -> dict[str, Callable[[], Any]]:
        self.plain()
        return {PLAIN: self.plain}

    def beside_ceilings(self, cell: Any, mine: Times, times: dict[str, Times]) -> dict[str, Any]:
        plain = times[PLAIN].median
        return {
            "visible_share": cell.visible_share, "plain_ms": plain * 1e3,
            "of_plain": mine.median / (plain * cell.visible_share),
        }  # fmt: skip

    def tables(self, records: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        titles = ("who", "kernel", "p50 ms", "p99 ms", "TFLOP/s", "of plain", "error")
        for key, found in groupby(records, lambda r: (r["op"], r["d_qk"], r["option"])):
            each = list(found)
            rows = [
                (r["who"], r["implementation"], *map(figure, (r["p50_ms"], r["p99_ms"])),
                 figure(r["tflops"]), f"{r['of_plain']:.2f}", error_text(r["max_error"]))
                for r in each
            ]  # fmt: skip
            op, dim, option = key
            told = f"a plain call {figure(each[0]['plain_ms'])} ms"
            yield f"{op} {option} D{dim} of {each[0]['seqlen_q']} rows; {told}", titles, rows

    def plots(self, records: list[dict[str, Any]]) -> list[Any]:
        return []

    def columns(self, records: list[dict[str, Any]]) -> Sequence[tuple[str, str]]:
        return (
            ("op", "op"), ("dtype", "dtype"), ("D", "d_qk"), ("S", "seqlen_q"),
            ("variant", "option"), ("who", "who"), ("implementation", "implementation"),
            ("p50 ms", "p50_ms"), ("p99 ms", "p99_ms"), ("TFLOP/s", "tflops"),
            ("of plain", "of_plain"), ("peak MiB", "peak_mib"), ("error", "max_error"),
        )  # fmt: skip
