# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen verify --gradient-errors: how far gradients lie from float64, over drawn shapes.

The named cases say whether each row is right. This says how right: of every shape the relative
error of dq, dk and dv, |x - truth| / |truth| in the Euclidean norm, beside that of the plain
computation in the same arithmetic, which nothing avoids.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

import fulmen

from .output import BAD, BadInputError, Output

DTYPES = ("float32", "float16", "bfloat16")
NAMES = ("dq", "dk", "dv")
MOST_ROWS = 160
DIMS = (8, 16, 32, 40, 64, 80, 96, 128)
HEADS = ((1, 1), (2, 2), (4, 2), (6, 1))  # of q, and of k and v
SEED = 0


def drawn(count: int) -> Iterator[Any]:
    """So many problems, the same in every run, each in every type."""
    from fulmen.lab.cases import Case

    draw = random.Random(SEED)
    for index in range(count):
        heads, kv_heads = draw.choice(HEADS)
        rows = sorted(draw.randint(1, MOST_ROWS) for _ in range(2))  # every query sees a key
        shape: dict[str, Any] = {
            "batch": draw.randint(1, 2), "heads": heads, "kv_heads": kv_heads, "q_rows": rows[0],
            "kv_rows": rows[1], "dim": draw.choice(DIMS), "causal": draw.random() < 0.5,
        }  # fmt: skip
        for dtype in DTYPES:
            yield Case(f"drawn{index:04d}_{dtype}", dtype=dtype, **shape)


def relative(x: Any, truth: Any) -> float:
    """|x - truth| / |truth|; 0 where both are 0."""
    error, size = (float(np.linalg.norm(y.ravel())) for y in (x - truth, truth))
    return error / size if size else (np.inf if error else 0.0)


def main(arguments: argparse.Namespace, ways: Iterable[Any], output: Output) -> int:
    """The report; 1 where a result disobeys the error rule."""
    if arguments.cases or arguments.record or arguments.again:
        raise BadInputError("--gradient-errors draws its own cases: leave out CASE and records")
    chosen = [way for way in ways if way.every == 1]
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    wrong, refused = [], dict[str, int]()
    cases = list(drawn(arguments.gradient_errors))
    with output.progress("gradients", len(cases)) as advance:
        for case in cases:
            for way in chosen:
                try:
                    errors = _errors(case, way)
                except fulmen.UnsupportedError:
                    refused[way.name] = refused.get(way.name, 0) + 1
                    continue
                for name, mine, plain, said in errors:
                    found.setdefault((way.name, case.dtype, name), []).append((mine, plain))
                    if said:
                        wrong.append(f"{case.name} on {way.name}: {name}: {said}")
            advance(1)
    _report(found, output)
    for name, count in refused.items():
        output.line(f"{name} refuses {count} of {len(cases)}")
    for sentence in wrong:
        output.line(sentence, BAD)
    if output.as_json:
        output.json([
            {"implementation": way, "dtype": dtype, "result": name, "relative_error": mine,
             "of_plain": plain}
            for (way, dtype, name), pairs in found.items() for mine, plain in pairs
        ])  # fmt: skip
    return int(bool(wrong) or not found)


def _errors(case: Any, way: Any) -> Iterator[tuple[str, float, float, str]]:
    """Of each gradient: its name, its error, the plain computation's, and what is wrong or ""."""
    from fulmen.lab.cases import judge, results

    backend = "cpu" if way.backend == "cpu" else "cuda"
    got, oracle = results(case, backend, way.implementation, way.arrays)
    for name in NAMES:
        truth, plain = (getattr(x, name) for x in (oracle.reference, oracle.plain))
        verdict = judge(name, got[name], oracle)
        said = "" if verdict.passed else verdict.message
        mine = relative(got[name].astype(truth.dtype), truth)
        yield name, mine, relative(plain.astype(truth.dtype), truth), said


def _report(found: dict[tuple[str, str, str], list[tuple[float, float]]], output: Output) -> None:
    columns = ("implementation", "dtype", "", "shapes", "median", "90 %", "largest",
               "plain: median", "largest")  # fmt: skip
    rows: list[Sequence[str]] = []
    for (way, dtype, name), pairs in sorted(found.items()):
        mine, plain = np.transpose(pairs)
        figures = (np.median(mine), np.quantile(mine, 0.9), mine.max(), np.median(plain),
                   plain.max())  # fmt: skip
        rows.append((way, dtype, name, str(len(pairs)), *(f"{x:.1e}" for x in figures)))
    output.table(columns, rows)
