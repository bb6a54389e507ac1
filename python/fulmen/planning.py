# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan once, run many times: everything that shapes and options decide, decided before the runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._calls import (
    SUMMED,
    backward_arrays,
    call,
    call_exported,
    forward_results,
    merging,
    new_sums,
    part_arrays,
    run,
)
from ._library import library, schema, text_of
from .array_types import (
    HOST,
    NO_STREAM,
    Array,
    OtherType,
    array_type_of,
    dtype_name,
    in_memory,
    is_torch,
    torch_call,
)
from .errors import ArgumentError, DTypeError, UnsupportedError, flag, one_of, shown, text, words
from .functional import Forward, Gradients, finished, handed_over
from .inspection import OPERATIONS, Explanation, Target, target_of
from .keywords import Options, takes
from .options import Prepared, integers, prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORWARD, BACKWARD = 0, 1


class Plan:
    """A call whose shapes, strides, dtypes and options are fixed; made by `fulmen.plan`.

    Contents of arrays and where they lie may change between runs, lengths, offsets and a device rng
    included. A plan may be run by several threads at once: each run has its own workspace, unless
    the caller brings one. On a GPU the plan has compiled and loaded the kernels: a run compiles
    nothing and waits for nothing, so that CUDA graphs capture it.
    """

    def __init__(
        self,
        prepared: Prepared,
        need: tuple[str, ...],
        out: Array,
        out_dtype: Any,
        target: Target,
        tile: str,
        accumulate: int,
    ) -> None:
        """Use `fulmen.plan`."""
        self._merges = bool(accumulate)
        if accumulate:
            prepared, out_dtype = merging(prepared)
        self._prepared = prepared
        self._need = need
        self._out_dtype = out_dtype
        self._threads = threading.local()
        settings, inputs, _ = prepared
        self._layout = settings.layout
        problem = target.settings(settings).problem
        beside = (problem, *target[1:], tile or None)
        results = forward_results(prepared, True, bool(need) or self._merges, out, out_dtype)
        if dtype_name(inputs[0].dtype) in schema().quantised:
            self._out_dtype = dtype_name(results[0].dtype)  # not that of q: the long way
        self._handles = [self._create(FORWARD, beside, inputs + results)]
        if need:
            o, _, stats = results
            sums = None
            if accumulate:  # a backward run has o as tensor cores read it
                o, sums = (
                    forward_results(prepared, False, False, None, None)[0],
                    new_sums(prepared, need),
                )
            arrays = inputs + backward_arrays(prepared, o, o, stats, None, need, sums)
            self._handles.append(self._create(BACKWARD, (*beside[:-1], None), arrays))
        self._workspace_bytes = [library().plan_workspace_bytes(h) for h in self._handles]
        given = {name: x for name, x in zip(schema().inputs, inputs) if x is not None}
        self._others = {name: given[name] for name in schema().optional_inputs if name in given}
        self._replaceable = self._others.keys() & schema().replaceable.keys()
        self._fast: tuple[Any, ...] | None = None  # of the fast path, from its first run on

    def _create(self, operation: int, beside: tuple[Any, ...], arrays: tuple[Array, ...]) -> int:
        lib = library()
        layout = self._layout.code
        results = schema().gradients if operation == BACKWARD else schema().results
        call_on = lib.plan_create, (operation, *beside), layout, arrays, results
        _, _, (_, array_type) = self._prepared
        if array_type.through_dlpack:
            handle = call_exported(*call_on, None, NO_STREAM)
        else:
            handle = call(*call_on)
        weakref.finalize(self, lib.plan_destroy, handle)
        return handle

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a run needs beside the arrays: the larger of forward and backward."""
        return max(self._workspace_bytes)

    @property
    def handles(self) -> tuple[int, ...]:
        """The plans of the library: forward, and backward where there is one."""
        return tuple(self._handles)

    def explain(self, operation: str = "forward") -> Explanation:
        """Which implementation runs, why, and why each other one does not.

        Args:
            operation: "forward", or "backward" for a plan with gradients.
        """
        return Explanation.parse(text_of(library().plan_explain, self._handle(operation)))

    def _handle(self, operation: str) -> int:
        operation = one_of("operation", operation, OPERATIONS)
        if operation == "backward" and not self._need:
            raise ArgumentError("the plan was made with need=(): it has no backward pass")
        return self._handles[operation == "backward"]

    def _own_workspace(self, like: Array) -> Array:
        """Of this thread in host memory, for one run after the other; None where none is needed."""
        if not self.workspace_bytes:
            return None
        workspace = getattr(self._threads, "workspace", None)
        if workspace is None:
            workspace = array_type_of(like, "q").scratch(self.workspace_bytes, like)
            self._threads.workspace = workspace
        return workspace

    def _leading(self, operation: int, workspace: Array, rebound: Prepared) -> tuple[Any, ...]:
        size = self._workspace_bytes[operation]
        if workspace is not None and not hasattr(workspace, "__dlpack__"):
            raise DTypeError(
                f"workspace is {shown(workspace)}; a vector of workspace_bytes bytes is expected"
            )
        if workspace is None and size:
            _, (q, *_), (stream, array_type) = rebound
            if array_type.device(q) != HOST:  # its allocator knows which stream may reuse it
                with array_type.on(stream, q):
                    workspace = array_type.scratch(size, q)
            else:
                workspace = self._own_workspace(q)
        return self._handles[operation], workspace

    def _rebound(
        self, q: Array, k: Array, v: Array, stream: Any, arrays: dict[str, Array]
    ) -> Prepared:
        settings, planned, _ = self._prepared
        inputs = [*in_memory((q, k, v), schema().inputs), *planned[3:]]
        self._layout.check_all(q, k, v, planned[schema().inputs.index("page_table")])
        replaceable = schema().replaceable
        for name, x in arrays.items():
            index = replaceable.get(name)
            if index is None:
                allowed = ", ".join(replaceable)
                raise ArgumentError(
                    f"a run of a plan takes {allowed}, not {name}: options are fixed"
                )
            if (x is None) != (inputs[index] is None):
                raise ArgumentError(
                    f"{name} is {'missing' if x is None else 'given'} and the plan was made "
                    f"{'with' if x is None else 'without'} it"
                )
            (inputs[index],) = in_memory((integers(x, name),), (name,))
        array_type = array_type_of(q, "q")
        return settings, tuple(inputs), (array_type.stream(q, stream), array_type)

    def _forward_fast(
        self,
        qkv: tuple[Array, Array, Array],
        others: dict[str, Array],
        out: Array,
        workspace: Array,
    ) -> Any:
        """(o, lse, stats) by one step of PyTorch's dispatcher; None where that has no such step."""
        if self._fast is None:
            which = torch_call("which_of")(self._others)
            self._fast = which, self._handles[FORWARD], self._layout.code, bool(self._need)
        if self._fast[0] is None:
            return None
        if workspace is None and not qkv[0].is_cuda:
            workspace = self._own_workspace(qkv[0])
        return torch_call("planned")(self._fast, qkv, others.values(), out, workspace)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array = None,
        accumulate: Forward | None = None,
        workspace: Array = None,
        stream: Any = None,
        **arrays: Array,
    ) -> Forward:
        """Runs the forward pass.

        Args:
            q, k, v: of the shapes, strides and dtypes that the plan was made for.
            out: array to write o into.
            accumulate: of a plan made with accumulate=True, and of no other: as in
                `fulmen.attention_forward`.
            workspace: vector of at least `workspace_bytes` bytes (uint8) for this run alone, where
                the arrays are; None: from the allocator of the type of q.
            stream: as in `fulmen.attention`.
            **arrays: bias, mask (boolean array), alibi_slopes, sinks, q_lengths, kv_lengths, cu_q,
                cu_kv, rng (array), blocks (lists) in place of those that the plan was made with.

        Returns:
            Forward(o, lse, stats); stats is None for a plan with need=().

        Raises:
            ArgumentError: an array does not agree with the plan.
        """
        self._check_accumulate(accumulate)
        may_be_fast = stream is None and self._out_dtype is None and is_torch(q)
        if may_be_fast and arrays.keys() <= self._replaceable:
            found = self._forward_fast((q, k, v), {**self._others, **arrays}, out, workspace)
            if found is not None:
                return Forward(*found)
        rebound = self._rebound(q, k, v, stream, arrays)
        _, inputs, where = rebound
        if accumulate is None:
            results = forward_results(rebound, True, bool(self._need), out, self._out_dtype)
        else:
            results = part_arrays(rebound, accumulate)
        leading = self._leading(FORWARD, workspace, rebound)
        call_on = library().plan_forward, leading, where, self._layout.code
        found = run(*call_on, inputs + results, schema().results)
        return Forward(*(handed_over(q, found, out) if accumulate is None else accumulate))

    def backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        stats: Array,
        *,
        accumulate: Gradients | None = None,
        workspace: Array = None,
        stream: Any = None,
        **arrays: Array,
    ) -> Gradients:
        """Runs the backward pass.

        Args:
            do: the gradient that arrives through o.
            q, k, v, o, stats: of the forward run; of a plan made with accumulate=True o in the
                dtype of q.
            accumulate: of a plan made with accumulate=True, and of no other: as in
                `fulmen.attention_backward`.
            workspace: as in `forward`.
            stream: as in `forward`.
            **arrays: as in `forward`.

        Returns:
            Gradients(dq, dk, dv, dbias, dsinks); None where the plan's `need` does not name it.

        Raises:
            ArgumentError: an array does not agree with the plan, or it has no backward pass.
        """
        self._handle("backward")
        self._check_accumulate(accumulate)
        rebound = self._rebound(q, k, v, stream, arrays)
        _, inputs, where = rebound
        arrays_of_run = inputs + backward_arrays(
            rebound, do, o, stats, None, self._need, accumulate
        )
        leading = self._leading(BACKWARD, workspace, rebound)
        call_on = library().plan_backward, leading, where, self._layout.code
        return finished(rebound, run(*call_on, arrays_of_run, schema().gradients), accumulate)

    def _check_accumulate(self, accumulate: Any) -> None:
        if (accumulate is not None) != self._merges:
            raise ArgumentError(
                f"accumulate is {'missing' if self._merges else 'given'} and the plan was made "
                f"with accumulate={self._merges}"
            )


@takes(Options)
def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Sequence[str] = ("q", "k", "v"),
    out: Array = None,
    out_dtype: Any = None,
    device: int | None = None,
    device_name: str | None = None,
    without: Sequence[str] = (),
    tile: str = "",
    accumulate: bool = False,
    **options: Unpack[Options],
) -> Plan:
    """Plans a call: what shapes, strides, dtypes and options decide, decided once.

    Args:
        q, k, v: arrays like those of the runs; their contents are not read.
        need: the gradients that `Plan.backward` computes; (): none, forward only.
        out: an array with the strides of the `out` of the runs, if they bring one.
        out_dtype: as in `fulmen.attention`.
        device: CUDA's number of the GPU that runs it; None: where q is. With it q, k, v and the
            arrays among the options may be anywhere, also in host memory.
        device_name: a GPU that need not be here, such as "h100" or "sm_90a": the plan explains
            itself and its kernels are compiled; it does not run.
        without: optimisations that the GPU kernels leave out, to measure what each buys; see
            `fulmen.explain`.
        tile: for searches: members of the config of the Hopper forward with numbers that replace
            the rules', "kv_rows=80 stages=2"; fulmen_experimental.h names them.
        accumulate: whether runs merge their result into a part, and add their gradients to those
            of others; with out=None.
        **options: those of `fulmen.attention_forward`.

    Raises:
        fulmen.Error: as `fulmen.attention`, before any run.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 2, 16, 8), np.float32)
    >>> plan = fulmen.plan(x, x, x, causal=True)
    >>> forward = plan.forward(x, x, x)
    >>> plan.backward(x, x, x, x, forward.o, forward.stats).dv.shape
    (1, 2, 16, 8)
    """
    if array_type_of(q, "q") is OtherType and out is not None:
        raise UnsupportedError("plan takes out= for NumPy and PyTorch arrays; pass out=None")
    names = words("need", need, "('q', 'k', 'v')")
    target = target_of(device, device_name, without)
    tile = text("tile", tile, "kv_rows=80 stages=2")
    merges = flag("accumulate", accumulate)
    if merges and (out is not None or out_dtype is not None):
        raise ArgumentError(
            "accumulate is True beside out or out_dtype; plans that merge parts have the o of what "
            "it is given: out=None, out_dtype=None"
        )
    if merges and names and not set(names) & set(SUMMED):
        raise ArgumentError(
            f"accumulate is True and need={names!r}; gradients of q, k and v are added up: name "
            "one, or pass need=()"
        )
    return Plan(prepare(q, k, v, options), names, out, out_dtype, target, tile, merges)
