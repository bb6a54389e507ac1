# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What is checked beside the error rule: bits that must be equal, memory that must be untouched.

What is promised of bits: o and lse have the same in every run of equal calls; gradients in every
run with `deterministic=True`, and on the CPU, whatever other gradients are asked for.

A `Run` is a case, its call and the implementation; it knows how to call the public functions. Each
check raises CheckError with one sentence. Called by run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fulmen
from fulmen.keywords import INVARIANT
from fulmen.masks import Tree

from . import views
from .arrays import Array, dtype_of, parameter_dtype, same_bits
from .case import Case
from .placement import Host, OnGpu, root
from .problem import Call, build_call
from .visible import Problem, segments, visible

LARGEST_SNAPSHOT = 1 << 26  # bytes
# options that may have a batch axis, and their rank when they do
BATCHED = {
    "q_lengths": 1, "kv_lengths": 1, "bias": 4, "mask": 4, "alibi_slopes": 2,
    "page_table": 2, "kv_start": 1, "positions": 2,
}  # fmt: skip
GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


class CheckError(Exception):
    """A check that did not hold, as one sentence."""


@dataclass(frozen=True)
class Run:
    """One case on one implementation."""

    case: Case
    problem: Problem
    call: Call
    where: dict[str, str]  # backend and implementation
    memory: Host | OnGpu = field(default_factory=Host)  # of the arrays, when the library gets them

    @property
    def repeatable(self) -> dict[str, Any]:
        """What calls ask for so that their gradients have the same bits in every run."""
        return {} if self.where["backend"] == "cpu" else {"deterministic": True}

    def options(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The keyword arguments of a call, with changes; None takes an option away."""
        given = {**self.call.options, **(changes or {}), **self.where}
        return {name: value for name, value in given.items() if value is not None}

    def forward(self, changes: Mapping[str, Any] | None = None) -> Any:
        """fulmen.attention_forward, into the caller's own output where the case asks."""
        call, options = self.call, self.options(changes)
        if self.case.out_dtype:
            options["out_dtype"] = self.case.out_dtype
        if not self.case.out:
            # gradients are of 16 bits: what saves nothing for them may be of 8
            stats = self.case.precision != "fp8" or bool(self.case.gradients)
            return self.memory.attention_forward(call.q, call.k, call.v, stats=stats, **options)
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        name = self.case.out_dtype or self.case.dtype
        out = views.VIEWS[self.case.out](np.full(shape, np.nan, dtype_of(name)))
        forward = self.memory.attention_forward(call.q, call.k, call.v, out=out, **options)
        if not same_bits(np.array(forward.o), np.array(out)):
            raise CheckError("the result is not what lies in the caller's output")
        written, out[...] = np.array(out), np.nan  # what is left of numbers lies around it
        if not np.isnan(root(out).astype(np.float32)).all():
            raise CheckError("something was written around the caller's output")
        out[...] = written
        return forward

    def backward(
        self, forward: Any, need: tuple[str, ...], changes: Mapping[str, Any] | None = None
    ) -> dict[str, Array]:
        """The gradients that were asked for, by name; the others must be None."""
        call, options = self.call, self.options(changes)
        if call.dlse is not None:
            options["dlse"] = call.dlse
        saved = forward.lse if self.case.lse_only else forward.stats
        got = self.memory.attention_backward(
            call.do, call.q, call.k, call.v, forward.o, saved, need=need, **options
        )
        found = {}
        for name, attribute in GRADIENT_OF.items():
            x = getattr(got, attribute)
            if (x is not None) != (name in need):
                state = "missing" if x is None else "not asked for"
                raise CheckError(f"{attribute} is {state} with need={need}")
            if x is None:
                continue
            parameter = getattr(call, name, call.options.get(name))
            assert parameter is not None
            if x.dtype != parameter.dtype:
                raise CheckError(f"{attribute} is {x.dtype}, its parameter is {parameter.dtype}")
            found[attribute] = x
        return found


def snapshot(x: Array) -> Array:
    """A copy of the memory around a view; of the view alone where that memory is huge."""
    around = root(x)
    return np.array(around if around.nbytes <= LARGEST_SNAPSHOT else x)


def unmodified(run: Run, before: list[Array]) -> None:
    """Inputs, and the gaps and guards around them, have their old bytes."""
    said = run.memory.modified()
    if said:
        raise CheckError(said)
    for x, old in zip(run.call.inputs(), before):
        if not same_bits(snapshot(x), old):
            raise CheckError(f"an input of shape {x.shape} was written to")


def head_major(name: str, x: Array, packed: bool) -> Array:
    """A result in the axes of the oracle: packed tensors are (row, head, dim) outside."""
    x = np.asarray(x)
    return x.swapaxes(0, 1) if packed and name in ("o", "dq", "dk", "dv") else x


def dtypes(case: Case, forward: Any) -> None:
    """O has the type of q or of out_dtype; lse is float32, or float64 for float64."""
    for name, want in (
        ("o", dtype_of(case.out_dtype or case.dtype)),
        ("lse", parameter_dtype(case.dtype)),
    ):
        if getattr(forward, name).dtype != want:
            raise CheckError(f"{name} is {getattr(forward, name).dtype}, not {want}")


def one_key_is_exact(run: Run, o: Array) -> None:
    """With one visible key, no sinks and no dropout, o is v[j] to the bit."""
    problem = run.problem
    o = head_major("o", o, run.case.packed)
    for at in segments(problem):
        v, rows = problem.v[at.kv_at], o[at.q_at]
        see = visible(problem.options, at.batch, at.head, len(rows), len(v))
        for i in np.flatnonzero(see.sum(axis=1) == 1):
            if not np.array_equal(rows[i], v[int(see[i].argmax())]):
                raise CheckError(f"row {(at.batch, at.head, int(i))} sees one key and is not its v")


def alone(
    run: Run, forward: Any, need: str, changes: Mapping[str, Any] | None = None
) -> dict[str, Array]:
    """One gradient by its name; none where the implementation makes it beside others only."""
    try:
        return run.backward(forward, (need,), changes)
    except fulmen.UnsupportedError:
        return {}


def each_alone(run: Run, forward: Any, together: dict[str, Array]) -> Iterator[dict[str, Array]]:
    """Each gradient alone has the bits that it has among the others, where those are repeatable.

    Yields the results that nobody has judged yet: on a GPU those of `deterministic` calls, and each
    gradient alone of plain ones.
    """
    if run.repeatable:
        together = run.backward(forward, run.case.needs, run.repeatable)
        yield together
    for need in run.case.needs:
        for attribute, x in alone(run, forward, need, run.repeatable).items():
            if not same_bits(np.array(x), np.array(together[attribute])):
                raise CheckError(f"{attribute} alone differs from {attribute} among the others")
        if run.repeatable:
            yield alone(run, forward, need)


def results(run: Run, changes: Mapping[str, Any] | None = None) -> dict[str, Array]:
    """All results of a call by name."""
    forward = run.forward(changes)
    found = {"o": forward.o, "lse": forward.lse}
    if run.case.gradients:
        found.update(run.backward(forward, run.case.needs, changes))
    return {name: np.array(x) for name, x in found.items()}


def gradients_of(found: dict[str, Array]) -> dict[str, Array]:
    """Those among results by name."""
    return {name: x for name, x in found.items() if name.startswith("d")}


def keep_bits(found: dict[str, Array], first: dict[str, Array], changes: Mapping[str, Any]) -> None:
    """Results that two ways to write a call must have to the bit."""
    for name, x in found.items():
        if not same_bits(x, first[name]):
            raise CheckError(f"{name} differs with {dict(changes) or 'the same call again'}")


def same_bits_with(run: Run, others: tuple[Mapping[str, Any], ...]) -> Iterator[dict[str, Array]]:
    """Results keep their bits under each change of the call: gradients, where they are repeatable.

    Yields gradients that nobody has judged yet: on a GPU those of plain calls that are changed, and
    of `deterministic` ones.
    """
    first = results(run, run.repeatable)
    plain = results(run) if run.repeatable else first
    if run.repeatable:
        yield gradients_of(first)
    for changes in others:
        keep_bits(results(run, {**changes, **run.repeatable}), first, changes)
        if not run.repeatable:
            continue
        found = results(run, changes)
        keep_bits({name: found[name] for name in ("o", "lse")}, plain, changes)
        yield gradients_of(found)


def other_numbers_with(run: Run, others: tuple[Mapping[str, Any], ...]) -> None:
    """O differs between the call and each change of it, and between the changes."""
    seen = {"the case": np.array(run.forward().o)}
    for changes in others:
        o = np.array(run.forward(changes).o)
        for before, old in seen.items():
            if same_bits(o, old):
                raise CheckError(f"o is the same with {dict(changes)} and with {before}")
        seen[str(dict(changes))] = o


def same_bits_alone(run: Run) -> None:
    """Each batch entry alone has the bits that it has in the batch, where that is asked for."""
    batch = results(run, INVARIANT)
    for b in range(run.case.batch):
        one = slice(b, b + 1)
        call = run.call
        options = dict(call.options)
        for name, full_rank in BATCHED.items():
            x = options.get(name)
            if isinstance(x, np.ndarray) and x.ndim == full_rank and len(x) > 1:
                options[name] = x[one]
        if isinstance(options.get("mask"), Tree):
            options["mask"] = Tree(options["mask"].words[one])
        do = None if call.do is None else call.do[one]
        dlse = None if call.dlse is None else call.dlse[one]
        pools = run.case.page_size > 0
        k, v = (x if pools else x[one] for x in (call.k, call.v))
        alone = Call(call.q[one], k, v, do, dlse, options)
        for name, x in results(
            Run(run.case, run.problem, alone, run.where, run.memory), INVARIANT
        ).items():
            if name in ("dbias", "dsinks"):  # sums over the batch
                continue
            if not same_bits(x, batch[name][one]):
                raise CheckError(f"{name} of batch entry {b} alone is not what it is in the batch")


def same_bits_moved(run: Run) -> None:
    """A call has the same bits with its pages elsewhere, in other pools and under other tables."""
    first = results(run)
    for placement in (1, 2):
        call = build_call(run.case, run.problem, placement)
        moved = Run(run.case, run.problem, call, run.where, run.memory)
        keep_bits(results(moved), first, {"pages": placement})


def repeated(run: Run) -> Run:
    """The same run with its one batch entry repeated by a stride of 0."""

    def many(x: Array) -> Array:
        return np.broadcast_to(x, (run.case.repeat, *x.shape[1:]))

    c = run.call
    do, dlse = (None if x is None else many(x) for x in (c.do, c.dlse))
    call = Call(many(c.q), many(c.k), many(c.v), do, dlse, c.options)
    return Run(run.case, run.problem, call, run.where, run.memory)


def merged_parts(run: Run) -> tuple[Array, Array]:
    """O and lse from parts over disjoint keys; sinks enter in the merge."""
    call, case = run.call, run.case
    options = run.options()
    sinks = options.pop("sinks", None)
    if case.out_dtype:
        options["out_dtype"] = case.out_dtype
    parts, first = [], 0
    for count in case.parts:
        keys = slice(first, first + count)
        first += count
        masked = {}
        if "mask" in options:
            masked["mask"] = options["mask"][..., keys]
        part = run.memory.attention_forward(
            call.q, call.k[..., keys, :], call.v[..., keys, :], **{**options, **masked}
        )
        parts.append((part.o, part.lse))
    assert first == case.kv_rows, f"{case.name}: parts hold {first} of {case.kv_rows} keys"
    merged = {} if sinks is None else {"sinks": sinks}
    o, lse = run.memory.merge(parts, **merged)
    return np.asarray(o), np.asarray(lse)


def accumulated_parts(run: Run) -> Any:
    """The Forward of parts over disjoint keys, each merged in place; sinks enter in the last."""
    call, case = run.call, run.case
    merged: Any = None
    for keys, options in _of_parts(run):
        if keys.stop != case.kv_rows:
            options.pop("sinks", None)
        if merged is None:
            options["out_dtype"] = parameter_dtype(case.dtype).name
        else:
            options["accumulate"] = merged
        merged = run.memory.attention_forward(
            call.q, call.k[..., keys, :], call.v[..., keys, :], **options
        )
    return merged


def _of_parts(run: Run) -> Iterator[tuple[slice, dict[str, Any]]]:
    """The keys of each part, and the options of a call on them."""
    case, options = run.case, run.options()
    first = 0
    for count in case.parts:
        keys = slice(first, first + count)
        own: dict[str, Any] = {}
        if "kv_segments" in options:  # of all keys in their order
            own["kv_segments"] = np.array([[0, count, first]], case.offsets)
        if isinstance(options.get("mask"), np.ndarray):
            own["mask"] = options["mask"][..., keys]
        yield keys, {**options, **own}
        first += count
    assert first == case.kv_rows, f"{case.name}: parts hold {first} of {case.kv_rows} keys"


def accumulated_gradients(run: Run, merged: Any) -> dict[str, Array]:
    """dq, dk and dv of parts, added up where they lie; all twice, and half of that."""
    call = run.call
    o = np.asarray(merged.o).astype(dtype_of(run.case.dtype))
    sums = [np.zeros(x.shape, parameter_dtype(run.case.dtype)) for x in (call.q, call.k, call.v)]
    for _ in range(2):
        for keys, options in _of_parts(run):
            dk, dv = (x[..., keys, :] for x in sums[1:])
            run.memory.attention_backward(
                call.do, call.q, call.k[..., keys, :], call.v[..., keys, :], o, merged.stats,
                need=("q", "k", "v"), accumulate=fulmen.Gradients(sums[0], dk, dv), **options,
            )  # fmt: skip
    is_rounded = run.where["backend"] != "cpu"  # to the dtype of q, before it is added
    dtype = dtype_of(run.case.dtype) if is_rounded else sums[0].dtype
    return {name: (x / 2).astype(dtype) for name, x in zip(("dq", "dk", "dv"), sums)}


def refused(run: Run) -> None:
    """The call raises fulmen.ArgumentError with a sentence, and no byte of out changes."""
    call = run.call
    out = np.full((*call.q.shape[:-1], call.v.shape[-1]), np.nan, call.q.dtype)
    before = out.copy()
    try:
        run.memory.attention_forward(
            call.q, call.k, call.v, out=out, **run.options(*run.case.others)
        )
    except fulmen.ArgumentError as error:
        if len(str(error).split()) < 5:
            raise CheckError(f"the sentence says too little: {error}") from error
    else:
        raise CheckError("the call was accepted")
    if not same_bits(out, before):
        raise CheckError("a refused call wrote to its output")
