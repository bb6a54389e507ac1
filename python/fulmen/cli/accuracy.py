# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How far results are from float64, and what the error rule says of it.

The reference is the one in the file, where it belongs to the same numbers and options; otherwise
fulmen.lab.cases.oracle computes one. The verdict is that of fulmen.lab.cases.error_rule, the same
as for every test; it judges the reference in the file as well.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.visible import Options, Problem

from .output import BadInputError
from .tensor_file import Array

LARGEST_PAIRS = 1 << 25  # the oracle is quadratic: beyond this there is no verdict
HEADS_AND_ROWS = ("q", "k", "v", "do", "o", "dq", "dk", "dv")


def head_major(name: str, x: Array, layout: str, packed: bool) -> Array:
    """A tensor in the axes of the oracle: (batch, head, row, ..) or, packed, (head, row, ..)."""
    if name in HEADS_AND_ROWS and layout in ("shd", "bshd"):
        x = x.swapaxes(-3, -2)
    missing = 0 if packed or name in ("dbias", "dsinks") else 4 - len(layout)
    return x.reshape((1,) * missing + x.shape)


def oracle_problem(tensors: dict[str, Array], options: dict[str, Any]) -> Problem:
    """A call in the words of the oracle."""
    layout, packed = options["layout"], "cu_q" in options
    arrays = {
        n: head_major(n, x, layout, packed) for n, x in tensors.items() if n in HEADS_AND_ROWS
    }
    window = options.get("window")
    if isinstance(window, int):
        window = (window, 0 if options.get("causal") and window >= 0 else window)
    named = (field.name for field in fields(Options))
    same = [name for name in named if name != "window" and options.get(name) is not None]
    said = Options(
        window=window or (-1, -1),
        masks=() if options.get("mask") is None else (options["mask"],),
        **{name: options[name] for name in same},
    )
    return Problem(arrays["q"], arrays["k"], arrays["v"], said, do=arrays.get("do"))


def pairs(problem: Problem) -> int:
    """Scores of the whole problem: what the oracle holds, head by head."""
    o = problem.options
    heads = int(np.prod(problem.q.shape[:-2]))
    if o.cu_q is None:
        return heads * int(problem.q.shape[-2]) * int(problem.k.shape[-2])
    assert o.cu_kv is not None
    return heads * int((np.diff(o.cu_q).astype(np.int64) * np.diff(o.cu_kv)).sum())


def judged(
    problem: Problem,
    results: dict[str, Array],
    references: dict[str, Array],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """One line for each result: its largest error, and the verdict.

    Args:
        problem: what was computed.
        results: by name (o, lse, dq, ..), as the public functions returned them.
        references: those of the file that hold for this call, by name.
        options: of the call; layout among them.

    Raises:
        BadInputError: a reference has another shape than the result.
    """
    layout, packed = options["layout"], "cu_q" in options
    for name, x in references.items():
        if name in results and x.shape != results[name].shape:
            raise BadInputError(
                f"the reference {name} has shape {x.shape}; the result has {results[name].shape}"
            )
    oracle = consult(problem, problem.q.dtype.name) if pairs(problem) <= LARGEST_PAIRS else None
    lines = []
    for name, returned in results.items():
        got = head_major(name, returned, layout, packed)
        line: dict[str, Any] = {"result": name, "reference": "computed"}
        truth = None if oracle is None else getattr(oracle.reference, name)
        if name in references:
            line["reference"] = "file"
            truth = head_major(name, references[name], layout, packed)
        if truth is None:
            continue
        line.update(_largest(got, truth))
        if oracle is not None:
            verdict = judge(name, got, oracle)
            line.update(passed=verdict.passed, of_allowed=verdict.ratio, worst_row=verdict.where)
            line.update(message=verdict.message)
        if oracle is not None and name in references:
            # A reference is right only if it obeys the rule itself.
            agreement = judge(name, truth, oracle)
            if not agreement.passed:
                line.update(passed=False, of_allowed=agreement.ratio, worst_row=agreement.where)
                line.update(message=f"the reference in the file is wrong: {agreement.message}")
        lines.append(line)
    return lines


def _largest(got: Array, reference: Array) -> dict[str, float]:
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(reference.dtype) - reference)
    finite = np.isfinite(error)
    scale = np.abs(reference[np.isfinite(reference)]).max(initial=0)
    return {
        "largest_error": float(error[finite].max(initial=0)),
        "largest_value": float(scale),
    }
