# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan once, run many times: everything that shapes and options decide, decided before the runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._library import (
    ARRAY_NAMES,
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    call,
    call_exported,
    library,
    run,
    text_argument,
    text_of,
)
from .errors import ArgumentError, DTypeError, UnsupportedError
from .inspection import Explanation, target_arguments
from .kinds import HOST, Array, kind_of
from .options import CallOptions, Prepared, integers, prepare
from .results import (
    Forward,
    Gradients,
    backward_arrays,
    finished,
    forward_outputs,
    handed_over,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORWARD, BACKWARD = 0, 1

# Arrays beside q, k, v whose contents may change between runs, and their place in the inputs.
REPLACEABLE = {
    "bias": 3,
    "mask": 4,
    "alibi_slopes": 5,
    "sinks": 6,
    "q_lengths": 7,
    "kv_lengths": 8,
    "cu_q": 9,
    "cu_kv": 10,
    "rng": 13,
}


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
        target: tuple[int, Any, int],
        tile: str,
    ) -> None:
        """Use `fulmen.plan`."""
        self._prepared = prepared
        self._need = need
        self._out_dtype = out_dtype
        self._target = target
        self._threads = threading.local()
        _, self._layout, inputs, _ = prepared
        outputs = forward_outputs(prepared, True, bool(need), out, out_dtype)
        self._handles = [self._create(FORWARD, inputs + outputs, FORWARD_RESULTS, tile)]
        if need:
            o, _, stats = outputs
            saved, gradients = backward_arrays(prepared, o, o, stats, None, need)
            arrays = inputs + saved + gradients
            self._handles.append(self._create(BACKWARD, arrays, BACKWARD_RESULTS))
        self._workspace_bytes = [library().plan_workspace_bytes(h) for h in self._handles]

    def _create(
        self, operation: int, arrays: tuple[Array, ...], results: range, tile: str = ""
    ) -> int:
        lib = library()
        create = lib.plan_create_tuned if tile else lib.plan_create
        tiles = (text_argument(tile),) if tile else ()
        leading = (operation, *tiles, *self._target, *self._prepared[0])
        layout = self._layout.rows_before_heads
        _, kind = self._prepared[3]
        if kind.through_dlpack:
            handle = call_exported(create, leading, layout, arrays, results, ARRAY_NAMES, 0)
        else:
            handle = call(create, leading, layout, arrays, results)
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
        if operation not in ("forward", "backward"):
            raise ArgumentError(f"operation is {operation!r}; allowed are 'forward', 'backward'")
        if operation == "backward" and not self._need:
            raise ArgumentError("the plan was made with need=(): it has no backward pass")
        return self._handles[operation == "backward"]

    def _leading(self, operation: int, workspace: Array, rebound: Prepared) -> tuple[Any, ...]:
        size = self._workspace_bytes[operation]
        if workspace is None and size:
            _, _, inputs, (stream, kind) = rebound
            if kind.device(inputs[0]) != HOST:  # its allocator knows which stream may reuse it
                with kind.on(stream, inputs[0]):
                    workspace = kind.scratch(size, inputs[0])
            else:
                workspace = getattr(self._threads, "workspace", None)
                if workspace is None:
                    workspace = kind.scratch(self.workspace_bytes, inputs[0])
                    self._threads.workspace = workspace
        return self._handles[operation], workspace

    def _rebound(
        self, q: Array, k: Array, v: Array, stream: Any, arrays: dict[str, Array]
    ) -> Prepared:
        numbers, layout, planned, _ = self._prepared
        inputs = [q, k, v, *planned[3:]]
        for name, x in zip("qkv", (q, k, v)):
            layout.check(x, name)
        kind = kind_of(q, "q")
        for name, x in arrays.items():
            place = REPLACEABLE.get(name)
            if place is None:
                raise ArgumentError(
                    f"a run of a plan takes {', '.join(REPLACEABLE)}, not {name}: options are fixed"
                )
            if (x is None) != (inputs[place] is None):
                raise ArgumentError(
                    f"{name} is {'missing' if x is None else 'given'} and the plan was made "
                    f"{'with' if x is None else 'without'} it"
                )
            inputs[place] = integers(x)
        return numbers, layout, tuple(inputs), (kind.stream(q, stream), kind)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array = None,
        workspace: Array = None,
        stream: Any = None,
        **arrays: Array,
    ) -> Forward:
        """Runs the forward pass.

        Args:
            q, k, v: of the shapes, strides and dtypes that the plan was made for.
            out: array to write o into.
            workspace: vector of at least `workspace_bytes` bytes (uint8) for this run alone, where
                the arrays are; None: from the allocator of the kind of q.
            stream: as in `fulmen.attention`.
            **arrays: bias, mask (boolean array), alibi_slopes, sinks, q_lengths, kv_lengths, cu_q,
                cu_kv, rng (array) in place of those that the plan was made with.

        Returns:
            Forward(o, lse, stats); stats is None for a plan with need=().

        Raises:
            ArgumentError: an array does not agree with the plan.
        """
        rebound = self._rebound(q, k, v, stream, arrays)
        outputs = forward_outputs(rebound, True, bool(self._need), out, self._out_dtype)
        leading = self._leading(FORWARD, workspace, rebound)
        every, rows_first = rebound[2] + outputs, self._layout.rows_before_heads
        function = library().plan_forward
        found = run(function, leading, rebound[3], rows_first, every, FORWARD_RESULTS)
        return Forward(*handed_over(q, found, out))

    def backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        stats: Array,
        *,
        workspace: Array = None,
        stream: Any = None,
        **arrays: Array,
    ) -> Gradients:
        """Runs the backward pass.

        Args:
            do: the gradient that arrives through o.
            q, k, v, o, stats: of the forward run.
            workspace: as in `forward`.
            stream: as in `forward`.
            **arrays: as in `forward`.

        Returns:
            Gradients(dq, dk, dv, dbias, dsinks); None where the plan's `need` does not name it.

        Raises:
            ArgumentError: an array does not agree with the plan, or it has no backward pass.
        """
        self._handle("backward")
        rebound = self._rebound(q, k, v, stream, arrays)
        saved, gradients = backward_arrays(rebound, do, o, stats, None, self._need)
        leading = self._leading(BACKWARD, workspace, rebound)
        inputs = rebound[2]
        every, rows_first = inputs + saved + gradients, self._layout.rows_before_heads
        function = library().plan_backward
        found = run(function, leading, rebound[3], rows_first, every, BACKWARD_RESULTS)
        return finished(inputs, found)


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
    **options: Unpack[CallOptions],
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
            the table's, "kv_rows=80 stages=2"; fulmen_plan_create_tuned in fulmen.h names them.
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
    if kind_of(q, "q").__name__ == "OtherKind" and out is not None:
        raise UnsupportedError("plan takes out= for NumPy and PyTorch arrays; pass out=None")
    names = (need,) if isinstance(need, str) else tuple(need)
    target = target_arguments(device, device_name, without)
    if not isinstance(tile, str):
        raise DTypeError(f"tile is {tile!r}; a text such as 'kv_rows=80 stages=2' is expected")
    return Plan(prepare(q, k, v, **options), names, out, out_dtype, target, tile)
