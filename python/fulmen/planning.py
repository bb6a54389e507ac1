# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan once, run many times: everything that shapes and options decide, decided before the runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import BACKWARD_RESULTS, FORWARD_RESULTS, call, library, text_of
from .arrays import Array, kind_of
from .errors import ArgumentError, UnsupportedError
from .functional import Forward, Gradients, backward_arrays, finished, forward_outputs, handed_over
from .inspection import Explanation
from .options import CallOptions, Prepared, integers, prepare

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
}


class Plan:
    """A call whose shapes, strides, dtypes and options are fixed; made by `fulmen.plan`.

    Contents of arrays and where they lie may change between runs, lengths and offsets included. A
    plan may be run by several threads at once: each has its own workspace, kept for its next run,
    unless the caller brings one.
    """

    def __init__(
        self, prepared: Prepared, need: tuple[str, ...], out: Array, out_dtype: Any
    ) -> None:
        """Use `fulmen.plan`."""
        self._prepared = prepared
        self._need = need
        self._out_dtype = out_dtype
        self._threads = threading.local()
        _, self._layout, inputs = prepared
        outputs = forward_outputs(prepared, True, bool(need), out, out_dtype)
        self._handles = [self._create(FORWARD, inputs + outputs, FORWARD_RESULTS)]
        if need:
            o, _, stats = outputs
            saved, gradients = backward_arrays(prepared, o, o, stats, None, need)
            arrays = inputs + saved + gradients
            self._handles.append(self._create(BACKWARD, arrays, BACKWARD_RESULTS))
        self._workspace_bytes = [library().plan_workspace_bytes(h) for h in self._handles]

    def _create(self, operation: int, arrays: tuple[Array, ...], results: range) -> int:
        lib = library()
        leading = (operation, *self._prepared[0])
        layout = self._layout.rows_before_heads
        handle = call(lib.plan_create, leading, layout, arrays, results)
        weakref.finalize(self, lib.plan_destroy, handle)
        return handle

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a run needs beside the arrays: the larger of forward and backward."""
        return max(self._workspace_bytes)

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

    def _leading(self, operation: int, workspace: Array) -> tuple[Any, ...]:
        size = self._workspace_bytes[operation]
        if workspace is None and size:
            workspace = getattr(self._threads, "workspace", None)
            if workspace is None:
                workspace = self._threads.workspace = np.empty(self.workspace_bytes, np.uint8)
        return self._handles[operation], workspace

    def _rebound(self, q: Array, k: Array, v: Array, arrays: dict[str, Array]) -> Prepared:
        numbers, layout, planned = self._prepared
        inputs = [q, k, v, *planned[3:]]
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
        for name, x in zip("qkv", (q, k, v)):
            layout.check(x, name)
        return numbers, layout, tuple(inputs)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array = None,
        workspace: Array = None,
        **arrays: Array,
    ) -> Forward:
        """Runs the forward pass.

        Args:
            q, k, v: of the shapes, strides and dtypes that the plan was made for.
            out: array to write o into.
            workspace: vector of at least `workspace_bytes` bytes (uint8) for this run alone.
            **arrays: bias, mask (boolean array), alibi_slopes, sinks, q_lengths, kv_lengths, cu_q,
                cu_kv in place of those that the plan was made with.

        Returns:
            Forward(o, lse, stats); stats is None for a plan with need=().

        Raises:
            ArgumentError: an array does not agree with the plan.
        """
        rebound = self._rebound(q, k, v, arrays)
        outputs = forward_outputs(rebound, True, bool(self._need), out, self._out_dtype)
        leading = self._leading(FORWARD, workspace)
        layout, arrays_in_order = self._layout.rows_before_heads, rebound[2] + outputs
        call(library().plan_forward, leading, layout, arrays_in_order, FORWARD_RESULTS)
        return Forward(*handed_over(q, outputs, out))

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
        **arrays: Array,
    ) -> Gradients:
        """Runs the backward pass.

        Args:
            do: the gradient that arrives through o.
            q, k, v, o, stats: of the forward run.
            workspace: as in `forward`.
            **arrays: as in `forward`.

        Returns:
            Gradients(dq, dk, dv, dbias, dsinks); None where the plan's `need` does not name it.

        Raises:
            ArgumentError: an array does not agree with the plan, or it has no backward pass.
        """
        self._handle("backward")
        rebound = self._rebound(q, k, v, arrays)
        saved, gradients = backward_arrays(rebound, do, o, stats, None, self._need)
        leading = self._leading(BACKWARD, workspace)
        inputs = rebound[2]
        layout, arrays_in_order = self._layout.rows_before_heads, inputs + saved + gradients
        call(library().plan_backward, leading, layout, arrays_in_order, BACKWARD_RESULTS)
        return finished(inputs, gradients)


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Sequence[str] = ("q", "k", "v"),
    out: Array = None,
    out_dtype: Any = None,
    **options: Unpack[CallOptions],
) -> Plan:
    """Plans a call: what shapes, strides, dtypes and options decide, decided once.

    Args:
        q, k, v: arrays like those of the runs; their contents are not read.
        need: the gradients that `Plan.backward` computes; (): none, forward only.
        out: an array with the strides of the `out` of the runs, if they bring one.
        out_dtype: as in `fulmen.attention`.
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
    return Plan(prepare("", q, k, v, **options), names, out, out_dtype)
