# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen run: attention, and gradients where the file has do, on the tensors of a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import fulmen
from fulmen.lab import naive
from fulmen.options import names_of

from . import accuracy, measure, tensor_file
from .arguments import DTYPES, add_options, new_file
from .output import BadInputError, Output
from .run_report import Finished, as_json, report, write_results
from .tensor_file import Array, FileProblem

DESCRIPTION = """\
Computes attention on the tensors of a safetensors file: time, memory against the naive way, error
against float64.

Tensors [PREFIX.]q, k, v and optionally do, bias, mask, sinks, cu_seqlens or lengths, and references
o, lse, dq, dk, dv, dbias, dsinks; each prefix is one problem. Metadata: layout, causal, alignment,
window and the factors of scores; flags override it. Without a file: the shipped example, one
training step of a small character model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help="a safetensors file")
    add("-o", "--output", type=new_file, metavar="FILE", help="write o, lse and gradients there")
    add("--prefix", action="append", help="only this problem of the file; may be repeated")
    add("--dtype", choices=DTYPES, help="convert the inputs first")
    add("--layout", help="axes of q, k, v, o: bhsd, bshd, hsd, shd or sd")
    add_options(parser, only=tensor_file.options_of_files())
    add("--backend", default="auto", help="auto or cpu")
    add("--implementation", default="auto", help="auto, scalar or tiled")
    add("--precision", choices=names_of("precision"), default="float32",
        help="of float32 products: tf32 and 3xtf32 allow a GPU's tensor cores")  # fmt: skip
    add("--repeat", type=int, default=0, metavar="N", help="times of each operation; 0: enough")
    add("--no-backward", action="store_true", help="leave the gradients out")


def example() -> Path:
    """The shipped example: in the wheel, or in the source tree.

    Raises:
        BadInputError: neither is there.
    """
    from importlib.resources import files

    name = "decoder.safetensors"
    paths = [
        Path(str(files("fulmen").joinpath("examples", name))),
        Path(__file__).resolve().parents[3] / "examples" / "data" / name,
    ]
    for path in paths:
        if path.is_file():
            return path
    raise BadInputError(f"the shipped example is not at {paths[0]}; fulmen run FILE takes any file")


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    if arguments.repeat < 0:
        raise BadInputError(f"--repeat is {arguments.repeat}; at least 0 is allowed")
    file = tensor_file.read(arguments.file or example())
    problems = _chosen(file.problems, arguments.prefix, file.path)
    with output.progress("running", 4 * len(problems)) as advance:
        finished = [run_problem(problem, arguments, advance) for problem in problems]
    if arguments.output is not None:
        write_results(arguments.output, finished)
    output.line(f"{_shown(file.path)}  {file.metadata.get('model', '')}".rstrip())
    if file.ignored:
        output.line(f"tensors that are not used here: {', '.join(file.ignored)}")
    for one in finished:
        report(one, output)
    if arguments.output is not None:
        output.line(f"\nresults written to {arguments.output}")
    if output.as_json:
        output.json(as_json(file, finished, arguments.output))
    return int(any(line.get("passed") is False for one in finished for line in one.lines))


def _chosen(problems: list[FileProblem], names: list[str] | None, path: Path) -> list[FileProblem]:
    known = [problem.name for problem in problems]
    for name in names or []:
        if name not in known:
            raise BadInputError(f"{path} has no problem {name!r}; it has {', '.join(known)}")
    return [p for p in problems if not names or p.name in names]


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def run_problem(problem: FileProblem, arguments: argparse.Namespace, advance: Any) -> Finished:
    """Runs and judges one problem."""
    tensors, exact = converted(problem.tensors, arguments.dtype)
    options, overridden = options_of(problem, tensors, arguments)
    call = {n: x for n, x in options.items() if n != "layout"}
    call.update(layout=options["layout"])
    need: tuple[str, ...] = ()
    if "do" in tensors and not arguments.no_backward:
        need = ("q", "k", "v", *(n for n in ("bias", "sinks") if n in tensors))
    try:
        results, measured = measure.run(tensors, call, need, arguments.repeat, advance)
    except fulmen.ArgumentError as error:
        raise BadInputError(f"{problem.name}: {error}" if problem.name else str(error)) from error
    advance(0 if need else 1)
    if not need:
        tensors = {n: x for n, x in tensors.items() if n != "do"}
    said = accuracy.oracle_problem(tensors, options)
    references = problem.references if exact and not overridden else {}
    lines = accuracy.judged(said, results, references, options)
    advance(1)
    return Finished(
        problem.name, tensors, options, results, measured,
        naive_bytes(said, measured, results), naive.measure(said, bool(need)), lines,
    )  # fmt: skip


def converted(tensors: dict[str, Array], dtype: str | None) -> tuple[dict[str, Array], bool]:
    """The inputs in another dtype, and whether they are the same numbers."""
    if dtype is None:
        return tensors, True
    from fulmen.array_types import named_dtype

    made, exact = {}, True
    for name, x in tensors.items():
        made[name] = x
        if name in ("q", "k", "v", "do", "bias", "sinks"):
            wanted = named_dtype("float64" if dtype == "float64" else "float32")
            made[name] = x.astype(wanted if name == "sinks" else named_dtype(dtype))
            same = made[name].astype(np.float64) == x.astype(np.float64)
            exact = exact and bool(np.all(same | np.isnan(x.astype(np.float64))))
    return made, exact


def options_of(
    problem: FileProblem, tensors: dict[str, Array], arguments: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """The options of the call, and whether a flag changed what the file says."""
    options = dict(problem.options)
    overridden = False
    for name in tensor_file.options_of_files():
        value = getattr(arguments, name)
        if value is not None and value != options.get(name):
            options[name], overridden = value, True
    rank = tensors["q"].ndim
    guess = {4: "bhsd", 3: "shd" if "cu_seqlens" in tensors else "hsd", 2: "sd"}.get(rank, "bhsd")
    options["layout"] = arguments.layout or options.get("layout", guess)
    for name in ("bias", "mask", "sinks"):
        if name in tensors:
            options[name] = tensors[name]
    if "cu_seqlens" in tensors:
        options.update(cu_q=tensors["cu_seqlens"], cu_kv=tensors["cu_seqlens"])
    elif "lengths" in tensors:
        options["kv_lengths"] = tensors["lengths"]
        axis = -3 if options["layout"] in ("bshd", "shd") else -2
        if rank > 2 and tensors["q"].shape[axis] == tensors["k"].shape[axis]:
            options["q_lengths"] = tensors["lengths"]
    options.update(backend=arguments.backend, implementation=arguments.implementation)
    options.update(precision=arguments.precision)
    return options, overridden


def naive_bytes(said: Any, measured: dict[str, Any], results: dict[str, Array]) -> dict[str, int]:
    """Closed form of the naive way: score matrices over padded sequences, and the same outputs."""
    q, k, o = said.q, said.k, said.options
    heads, rows, columns = int(np.prod(q.shape[:-2])), q.shape[-2], k.shape[-2]
    if o.cu_q is not None:
        heads *= len(o.cu_q) - 1
        rows, columns = (int(np.diff(x).max(initial=0)) for x in (o.cu_q, o.cu_kv))
    wide = q.dtype == np.float64
    found = {}
    for operation in measured:
        names = ("o", "lse") if operation == "forward" else ("dq", "dk", "dv", "dbias", "dsinks")
        outputs = sum(results[name].nbytes for name in names if name in results)
        matrices = naive.matrix_bytes(heads * rows * columns, wide, operation == "backward")
        found[operation] = matrices + outputs
    return found
