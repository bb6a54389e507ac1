# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Who answers a cell: fulmen, the naive way, and other libraries (peers_torch, peers_other).

A side makes a call without arguments from the tensors of a cell, once; the call is what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

import fulmen

from .cells import DOCUMENT, HUGE, OPTIONS, WINDOW, Cell
from .loading import MissingError

NAIVE_BYTES = 1 << 35  # score matrices beyond this are not tried


@dataclass
class Tensors:
    """The inputs of a cell in the axes (batch, head, row, dim), contiguous; packed: batch 1."""

    q: Any
    k: Any
    v: Any
    do: Any


def random_tensors(cell: Cell, torch: Any, device: str) -> Tensors:
    """Normal inputs, the same in every run of a cell; of NumPy where torch is None."""
    rows = (1, sum(cell.lengths)) if cell.option == "packed" else (cell.batch, cell.rows)
    shapes = [(rows[0], heads, rows[1], cell.dim) for heads in (cell.heads, cell.kv_heads)]
    shapes = [shapes[0], shapes[1], shapes[1], shapes[0]]
    if torch is None:
        rng = np.random.default_rng(0)
        drawn = (rng.standard_normal(shape, np.float32) for shape in shapes)
        return Tensors(*(x.astype(cell.dtype) for x in drawn))
    source = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=source, device=device) for shape in shapes]
    if cell.option == "huge":
        made[:2] = [HUGE * x for x in made[:2]]
    return Tensors(*(x.to(getattr(torch, cell.dtype)) for x in made))


def offsets(cell: Cell) -> list[int]:
    """Where the packed sequences, or the documents, of a cell begin and end."""
    return [0, *accumulate(cell.lengths)]


def on_gpu(numbers: list[int]) -> Any:
    """Integers in the memory of torch's GPU."""
    torch: Any = import_module("torch")
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def on_host(numbers: list[int]) -> Any:
    """Integers in NumPy's memory."""
    return np.asarray(numbers, np.int32)


@dataclass
class Answer:
    """A call, and what it gives: o, or (dq, dk, dv), in the axes of Tensors."""

    call: Callable[[], Any]
    results: Callable[[Any], tuple[Any, ...]]
    implementation: str
    extra_bytes: int = 0  # taken from outside the allocator that is watched


def autograd_answer(o: Any, inputs: tuple[Any, ...], do: Any, implementation: str) -> Answer:
    """The backward pass of a result that autograd recorded."""
    torch: Any = import_module("torch")

    return Answer(
        lambda: torch.autograd.grad(o, inputs, do, retain_graph=True), lambda g: g, implementation
    )


class Side:
    """One library, or one way of it."""

    name = ""  # `who` of a record
    options: tuple[str, ...] = ("",)  # of cells that it answers

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        """The call for a cell.

        Raises:
            MissingError: it cannot answer this cell.
        """
        raise NotImplementedError


class Fulmen(Side):
    """The public functions of this package."""

    name = "fulmen"
    options = OPTIONS

    def __init__(
        self,
        implementation: str = "auto",
        without: tuple[str, ...] = (),
        precision: str = "float32",
    ) -> None:
        """By the name of an implementation, less some of its optimisations."""
        self.asked = implementation
        self.without = without
        self.precision = precision
        if precision != "float32":
            self.name = f"fulmen {precision}"

    def _takes(self, cell: Cell) -> bool:
        """Whether its precision is one of the cell's type: fp8 of 16 bits, the others of 32."""
        return self.precision == "float32" or (self.precision == "fp8") != (cell.dtype == "float32")

    def _options(self, cell: Cell, array: Callable[[list[int]], Any]) -> dict[str, Any]:
        """The keywords of a cell; its integers as `array` makes them."""
        options: dict[str, Any] = {"causal": cell.causal, "implementation": self.asked}
        if cell.option == "deterministic":
            options["deterministic"] = True
        if self.precision != "float32" and self._takes(cell):
            options["precision"] = self.precision
        if cell.option == "window":
            options["window"] = (WINDOW, 0)
        if cell.option == "documents":
            ids = [i // DOCUMENT for i in range(cell.rows)]
            options["mask"] = fulmen.masks.documents(array(ids))
        if cell.option == "packed":
            at = array(offsets(cell))
            options.update(cu_q=at, cu_kv=at, max_q=cell.rows, max_kv=cell.rows, layout="hsd")
        return options

    def problem(self, cell: Cell) -> dict[str, Any]:
        """A cell as `fulmen.warmup` takes it."""
        leading = () if cell.option == "packed" else (cell.batch,)
        rows = sum(cell.lengths) if cell.option == "packed" else cell.rows
        kv = (*leading, cell.kv_heads, rows, cell.dim)
        need = ("q", "k", "v") if cell.op == "backward" else ()
        return {
            "q": (*leading, cell.heads, rows, cell.dim), "k": kv, "v": kv, "need": need,
            "dtype": cell.dtype, "without": self.without, **self._options(cell, on_host),
        }  # fmt: skip

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        q, k, v, do = tensors.q, tensors.k, tensors.v, tensors.do
        if not self._takes(cell):
            raise MissingError(f"{self.precision} is no precision of {cell.dtype}")
        options = self._options(cell, on_gpu)
        attention: Callable[..., Any] = fulmen.attention
        if cell.option == "packed":
            q, k, v, do = (x[0] for x in (q, k, v, do))
            attention = fulmen.attention_varlen
        try:
            said = fulmen.explain(q, k, v, operation=cell.op, without=self.without, **options)
            plan = None
            if cell.graph or self.without:
                plan = fulmen.plan(q, k, v, need=(), without=self.without, **options)
                forward = plan.forward(q, k, v)
        except fulmen.UnsupportedError as error:
            raise MissingError(str(error)) from error
        chosen, workspace = said["implementation"], int(said["workspace_bytes"])
        if plan is not None:
            o = forward.o
            return Answer(lambda: plan.forward(q, k, v, out=o), lambda x: (x.o,), chosen)
        if cell.op == "forward":
            return Answer(lambda: attention(q, k, v, **options), _as_tensors, chosen, workspace)
        made = fulmen.attention_forward(q, k, v, **options)
        return Answer(
            lambda: fulmen.attention_backward(do, q, k, v, made.o, made.stats, **options),
            lambda g: _as_tensors(g.dq, g.dk, g.dv),
            chosen,
            workspace,
        )


def _as_tensors(*results: Any) -> tuple[Any, ...]:
    """Results with the axes of Tensors."""
    return tuple(x.reshape(-1, *x.shape[-3:]) for x in results)


class NaiveNumpy(Side):
    """The whole score matrix in memory, in NumPy, for machines without torch."""

    name = "naive"

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        from ..cases.visible import Options
        from ..naive import forward

        if cell.op != "forward":
            raise MissingError("the naive way in NumPy has no timed backward pass")
        visible = fulmen.dense_mask(cell.rows, cell.rows, causal=True) if cell.causal else None
        q, k, v = tensors.q, tensors.k, tensors.v
        return Answer(lambda: forward(q, k, v, visible, Options())[0], lambda o: (o,), "numpy")
