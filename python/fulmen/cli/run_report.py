# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What `fulmen run` says of a problem that it has computed: text, JSON, a file of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulmen

from . import measure, tensor_file
from .output import ACCEPTABLE, BAD, Output, bytes_text, seconds_text
from .tensor_file import Array


@dataclass
class Finished:
    """One problem after its run."""

    name: str
    tensors: dict[str, Array]
    options: dict[str, Any]
    results: dict[str, Array]
    measured: dict[str, measure.Measured]
    naive_bytes: dict[str, int]  # closed form
    naive_run: dict[str, Any] | None
    lines: list[dict[str, Any]]  # run.judged


def report(one: Finished, output: Output) -> None:
    """One problem as text."""
    output.line()
    axes = f"{one.options['layout']}"
    shapes = ", ".join(f"{n} {'x'.join(map(str, one.tensors[n].shape))}" for n in "qkv")
    name = f"{one.name}: " if one.name else ""
    dtype, of_kv = (one.tensors[n].dtype.name for n in "qk")
    dtypes = dtype if of_kv == dtype else f"{dtype}, k and v {of_kv}"
    output.line(f"{name}{shapes} ({axes}), {dtypes}; {_options_text(one)}")
    for operation, m in one.measured.items():
        e = m.explanation
        output.line(f"{operation}: {e['implementation']} on {e['backend']}: {e['reason']}")
        for other in e["rejected"]:
            output.line(f"  not {other['implementation']}: {other['reason']}")
    rows = []
    for operation, m in one.measured.items():
        way = (one.naive_run or {}).get(operation)
        rows.append((
            operation, seconds_text(m.median), str(len(m.seconds)),
            f"{m.flops / m.median / 1e9:.3g}", bytes_text(m.memory_bytes),
            bytes_text(one.naive_bytes[operation]),
            f"{bytes_text(way['peak_bytes'])} in {seconds_text(way['seconds'])}" if way else "",
        ))  # fmt: skip
    columns = ("operation", "median", "of", "GFLOP/s", "memory", "naive needs", "naive in NumPy")
    output.table(columns, rows)
    if one.lines:
        output.table(
            ("result", "largest error", "largest value", "of allowed", "verdict", "reference"),
            [_verdict_row(line) for line in one.lines],
            lambda row: BAD if row[4] == "too far" else ACCEPTABLE if row[4] else "",
        )
        for line in one.lines:
            if line.get("passed") is False:
                output.line(f"{line['result']}: {line['message']}", BAD)
    else:
        output.line("no reference in the file, and too large for one to be computed here")


def _verdict_row(line: dict[str, Any]) -> tuple[str, ...]:
    passed = line.get("passed")
    verdict = "" if passed is None else "within rule" if passed else "too far"
    return (
        line["result"],
        f"{line['largest_error']:.2e}",
        f"{line['largest_value']:.2e}",
        "" if passed is None else f"{line['of_allowed']:.2f}",
        verdict,
        line["reference"],
    )


def _options_text(one: Finished) -> str:
    o = one.options
    words = ["causal" if o.get("causal") else "not causal"]
    words += [f"{n} {o[n]}" for n in tensor_file.options_of_files() if n != "causal" and o.get(n)]
    words += [n for n in ("bias", "mask", "sinks") if n in o]
    if "cu_q" in o:
        words.append(f"{len(o['cu_q']) - 1} packed sequences")
    if "kv_lengths" in o:
        words.append(f"lengths {o['kv_lengths'].tolist()}")
    return ", ".join(words)


def write_results(path: Path, finished: list[Finished]) -> None:
    """Results under the names that references have, so that a later run can compare."""
    tensors = {
        f"{one.name}.{name}" if one.name else name: x
        for one in finished
        for name, x in one.results.items()
    }
    metadata = {"layout": finished[0].options["layout"], "made_by": f"fulmen {fulmen.__version__}"}
    tensor_file.write(path, tensors, metadata)


def as_json(file: Any, finished: list[Finished], written: Path | None) -> dict[str, Any]:
    """Everything that the text says, and a little more."""
    return {
        "file": str(file.path),
        "metadata": file.metadata,
        "unused_tensors": file.ignored,
        "written": None if written is None else str(written),
        "problems": [
            {
                "name": one.name,
                "dtype": one.tensors["q"].dtype.name,
                "kv_dtype": one.tensors["k"].dtype.name,
                "layout": one.options["layout"],
                "shapes": {n: list(x.shape) for n, x in one.tensors.items()},
                "options": _options_text(one),
                "operations": {
                    operation: {
                        "explanation": dict(m.explanation),
                        "median_seconds": m.median,
                        "repeats": len(m.seconds),
                        "flops": m.flops,
                        "gflops_per_second": m.flops / m.median / 1e9,
                        "memory_bytes": m.memory_bytes,
                        "workspace_bytes": m.workspace_bytes,
                        "naive_bytes": one.naive_bytes[operation],
                        "naive_measured": (one.naive_run or {}).get(operation),
                    }
                    for operation, m in one.measured.items()
                },
                "accuracy": one.lines,
            }
            for one in finished
        ],
    }
