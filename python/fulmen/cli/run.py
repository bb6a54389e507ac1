# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen run: attention, and gradients where the file has do, on the tensors of a file.

Errors are against the references in the file, where they belong to the same numbers and options;
otherwise against fulmen.lab.cases.oracle. The verdict is that of fulmen.lab.cases.error_rule, the
same as for every test; it judges the references in the file as well.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import fulmen
from fulmen.lab import naive
from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.quantised import MOST
from fulmen.lab.cases.visible import Options, Problem
from fulmen.options import implementations, names_of

from . import measure, tensor_file
from .arguments import DTYPES, add_options, new_file, why_no_gpu
from .output import BadInputError, Output
from .run_report import Finished, as_json, report, write_results
from .tensor_file import Array, FileProblem

LARGEST_PAIRS = 1 << 25  # the oracle is quadratic: beyond this there is no verdict
HEADS_AND_ROWS = ("q", "k", "v", "do", "o", "dq", "dk", "dv")

DESCRIPTION = """\
Computes attention on the tensors of a file (safetensors, or NumPy's .npz): time, memory against the
naive way, error against float64. Where a GPU is, the tensors are copied to it and it runs there.

Tensors [PREFIX.]q, k, v and optionally do, bias, mask, sinks, cu_seqlens or lengths, and references
o, lse, dq, dk, dv, dbias, dsinks; each prefix is one problem. Metadata: layout, causal, alignment,
window and the factors of scores; flags override it. Without a file: the shipped example, one
training step of a small character model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="safetensors, .npz, or q.npy with k.npy and v.npy beside it",
    )
    add(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        help="write o, lse and gradients there, .npz by that ending, else safetensors",
    )
    add("--prefix", action="append", help="only this problem of the file; may be repeated")
    add("--dtype", choices=DTYPES, help="convert the inputs first")
    add("--layout", help="axes of q, k, v, o: bhsd, bshd, hsd, shd or sd")
    add_options(parser, only=tensor_file.options_of_files())
    add("--backend", choices=names_of("backend"), default="auto",
        help="cuda copies the tensors to the first GPU; auto: cuda where a GPU is")  # fmt: skip
    add("--implementation", choices=names_of("implementation"), default="auto", metavar="NAME",
        help=f"of {', '.join(names_of('implementation'))}")  # fmt: skip
    add("--precision", choices=names_of("precision"), default="float32",
        help="tf32 and 3xtf32 allow a GPU's tensor cores for float32, fp8 those of 8 bits for "
        "float16 and bfloat16")  # fmt: skip
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
    place, said = _place(arguments)
    with output.progress("running", 4 * len(problems)) as advance:
        finished = [run_problem(problem, arguments, advance, place) for problem in problems]
    if arguments.output is not None:
        write_results(arguments.output, finished)
    output.line(f"{_shown(file.path)}  {file.metadata.get('model', '')}".rstrip())
    output.line(said)
    if file.ignored:
        output.line(f"tensors that are not used here: {', '.join(file.ignored)}")
    for one in finished:
        report(one, output)
    if arguments.output is not None:
        output.line()
        output.line(f"results written to {arguments.output}")
    if output.as_json:
        output.json(as_json(file, finished, arguments.output))
    return int(any(line.get("passed") is False for one in finished for line in one.lines))


def _place(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Where the problems run, and the sentence that says so.

    Raises:
        BadInputError: a GPU is asked for and none can be used, or an implementation of another
            backend.
    """
    backend, name = arguments.backend, arguments.implementation
    of_cpu, of_gpu = name in implementations("cpu"), name in implementations("cuda")
    if (backend == "cuda" and of_cpu) or (backend == "cpu" and of_gpu):
        allowed = ", ".join(("auto", *implementations(backend)))
        raise BadInputError(
            f"--implementation is {name} and --backend {backend}; allowed there are {allowed}"
        )
    if backend == "cpu" or of_cpu:
        return measure.Host(), "on the CPU"
    gpu = fulmen.gpu_info()
    missing = why_no_gpu(gpu)
    if missing and (backend == "cuda" or of_gpu):
        raise BadInputError(f"no GPU to run on: {missing}")
    if missing:
        return measure.Host(), f"on the CPU; {missing}" if gpu["devices"] else "on the CPU"
    from fulmen.lab.gpu_memory import memory

    device = gpu["devices"][0]
    return memory(), f"copied to GPU {device['index']}, {device['name']} ({device['arch']})"


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


def run_problem(
    problem: FileProblem, arguments: argparse.Namespace, advance: Any, place: Any
) -> Finished:
    """Runs and judges one problem."""
    tensors, exact = converted(problem.tensors, arguments.dtype)
    if "do" in tensors and not arguments.no_backward and is_quantised(tensors["k"]):
        raise BadInputError(
            f"k is {tensors['k'].dtype.name}, of which there are no gradients; leave do out, or "
            "add --no-backward"
        )
    options, overridden = options_of(problem, tensors, arguments)
    need: tuple[str, ...] = ()
    if "do" in tensors and not arguments.no_backward:
        need = ("q", "k", "v", *(n for n in ("bias", "sinks") if n in tensors))
    try:
        results, measured = measure.run(tensors, options, need, arguments.repeat, advance, place)
    except fulmen.ArgumentError as error:
        raise BadInputError(f"{problem.name}: {error}" if problem.name else str(error)) from error
    advance(0 if need else 1)
    if not need:
        tensors = {n: x for n, x in tensors.items() if n != "do"}
    said = oracle_problem(values_of(tensors), options)
    references = problem.references if exact and not overridden else {}
    dtype = results["o"].dtype if is_quantised(tensors["q"]) else tensors["q"].dtype
    lines = judged(said, dtype.name, results, references, options)
    advance(1)
    return Finished(
        problem.name, tensors, options, results, measured,
        naive_bytes(said, measured, results), naive.measure(said, bool(need)), lines,
    )  # fmt: skip


def converted(tensors: dict[str, Array], dtype: str | None) -> tuple[dict[str, Array], bool]:
    """The inputs in another dtype but those of 8 bits, and whether they are the same numbers."""
    if dtype is None:
        return tensors, True
    from fulmen.array_types import named_dtype

    made, exact = {}, True
    for name, x in tensors.items():
        made[name] = x
        if name in ("q", "k", "v", "do", "bias", "sinks") and not is_quantised(x):
            wanted = named_dtype("float64" if dtype == "float64" else "float32")
            made[name] = x.astype(wanted if name == "sinks" else named_dtype(dtype))
            same = made[name].astype(np.float64) == x.astype(np.float64)
            exact = exact and bool(np.all(same | np.isnan(x.astype(np.float64))))
    return made, exact


def is_quantised(x: Array) -> bool:
    """Whether an array is of a dtype of 8 bits, which q, k and v may have."""
    return x.dtype.name in MOST


def values_of(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors with the values of quantised q, k and v, in float64."""
    found = dict(tensors)
    for name, scale in zip("qkv", tensor_file.SCALES):
        if is_quantised(tensors[name]):
            found[name] = tensors[name].astype(np.float64) * found.pop(scale, 1.0)
    return found


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
    for name in ("bias", "mask", "sinks", *tensor_file.SCALES):
        if name in tensors:
            options[name] = tensors[name]
    if "cu_seqlens" in tensors:
        options.update(cu_q=tensors["cu_seqlens"], cu_kv=tensors["cu_seqlens"])
    elif "lengths" in tensors:
        options["kv_lengths"] = tensors["lengths"]
        axis = -3 if options["layout"] in ("bshd", "shd") else -2
        if rank > 2 and tensors["q"].shape[axis] == tensors["k"].shape[axis]:
            options["q_lengths"] = tensors["lengths"]
    options.update(implementation=arguments.implementation)
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
    dtype: str,
    results: dict[str, Array],
    references: dict[str, Array],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """One line for each result: its largest error, and the verdict.

    Args:
        problem: what was computed.
        dtype: of q, or where q has 8 bits of o.
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
    oracle = consult(problem, dtype) if pairs(problem) <= LARGEST_PAIRS else None
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
