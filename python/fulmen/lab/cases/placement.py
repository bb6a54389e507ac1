# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a case are when the library gets them: host memory, or that of a GPU.

Cases are made and judged in NumPy. `OnGpu` stands between: it takes and returns NumPy arrays, and
calls the public functions with copies on the GPU that have the same strides, offsets, gaps and
alignment. A caller's output comes back with all that lies around it, so that what was written
outside shows. Called by checks; gpu_arrays knows the owners of GPU memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import fulmen
from fulmen.expressions import Score
from fulmen.masks import Blocks, Documents, Expression, Tree

from .arrays import Array

ALIGNMENT = 64  # bytes: addresses keep their remainder


class Forward(NamedTuple):
    """Results of a forward call in NumPy; stats stay where they were made."""

    o: Array
    lse: Array
    stats: Any


def forward(*arrays: Any, stats: bool, **options: Any) -> Any:
    """(o, lse, stats) of a call, which saves nothing for gradients without stats."""
    if stats:
        return fulmen.attention_forward(*arrays, **options)
    o, lse = fulmen.attention(*arrays, return_lse=True, **options)
    return Forward(o, lse, None)


class Host:
    """The public functions themselves, on NumPy arrays."""

    name = "numpy"

    def attention_forward(self, *arrays: Any, stats: bool = True, **options: Any) -> Any:
        """fulmen.attention_forward; without stats fulmen.attention."""
        return forward(*arrays, stats=stats, **options)

    def attention_backward(self, *arrays: Any, **options: Any) -> Any:
        """fulmen.attention_backward."""
        return fulmen.attention_backward(*arrays, **options)

    def merge(self, parts: Any, **options: Any) -> Any:
        """fulmen.merge."""
        return fulmen.merge(parts, **options)

    def append_kv(self, *arrays: Any, **options: Any) -> Any:
        """fulmen.append_kv: the first two are written."""
        return fulmen.append_kv(*arrays, **options)

    def rotary(self, *arrays: Any, **options: Any) -> Any:
        """fulmen.rotary."""
        return fulmen.rotary(*arrays, **options)

    def mla_indexer(self, *arrays: Any, **options: Any) -> Any:
        """fulmen.mla_indexer."""
        return fulmen.mla_indexer(*arrays, **options)

    def quantise(self, *arrays: Any, **options: Any) -> Any:
        """fulmen.quantise."""
        return fulmen.quantise(*arrays, **options)

    def hadamard(self, x: Any) -> Any:
        """fulmen.hadamard."""
        return fulmen.hadamard(x)

    def modified(self) -> str:
        """Which copy of an input was written to; "" where there are none."""
        return ""


class Block(NamedTuple):
    """The memory around a view on the host, and its copy on the GPU."""

    around: Array  # the host's, kept alive: its id names the block
    copy: Any  # a vector of bytes of the owner of GPU memory
    first: int  # where the copy begins in it, so that addresses keep their alignment


def root(x: Array) -> Array:
    """The array that owns the memory of a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def address(x: Array) -> int:
    """Where the first element is."""
    return int(x.__array_interface__["data"][0])


class OnGpu:
    """The public functions on copies of NumPy arrays in the memory of a GPU."""

    def __init__(self, owner: Any) -> None:
        """With an owner of GPU memory: gpu_arrays."""
        self.owner = owner
        self.name: str = owner.name
        self._blocks: dict[int, Block] = {}

    def attention_forward(
        self, q: Any, k: Any, v: Any, out: Any = None, stats: bool = True, accumulate: Any = None,
        **options: Any,
    ) -> Forward:  # fmt: skip
        """As Host's; `out` has afterwards what its copy has, and the gaps too."""
        with self.owner.stream():
            arguments = [self.put(x) for x in (q, k, v)]
            moved = self.options(options)
            if accumulate is not None:
                moved["accumulate"] = fulmen.Forward(*accumulate.stats)  # where they were made
            if out is None:
                found = forward(*arguments, stats=stats, **moved)
            else:
                block = self._copied(out)
                try:
                    target = self._view(out, block)
                    found = forward(*arguments, stats=stats, out=target, **moved)
                finally:
                    self._bring_back(block)
            o, lse = self.owner.get(found.o), self.owner.get(found.lse)
        return Forward(o if out is None else out, lse, (found.o, found.lse, found.stats))

    def attention_backward(
        self, do: Any, q: Any, k: Any, v: Any, o: Any, saved: Any, accumulate: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """fulmen.attention_backward; `saved` is the stats of `attention_forward`, or its lse.

        Sums to which gradients are added have afterwards what their copies have.
        """
        with self.owner.stream():
            if accumulate is not None:
                o, saved = self.owner.contiguous(o), saved[2]
            elif isinstance(saved, tuple):
                o, _, saved = saved
            else:
                o, saved = self.put(o), self.put(saved)
            do, q, k, v = (self.put(x) for x in (do, q, k, v))
            moved = self.options(options)
            if accumulate is not None:
                return self._added((do, q, k, v, o, saved), accumulate, moved)
            found = fulmen.attention_backward(do, q, k, v, o, saved, **moved)
            return found._replace(
                **{name: self._got(x) for name, x in found._asdict().items() if x is not None}
            )

    def _added(self, arrays: tuple[Any, ...], sums: Any, options: dict[str, Any]) -> Any:
        blocks = [self._copied(x) for x in sums[:3]]
        moved = fulmen.Gradients(*(self._view(x, block) for x, block in zip(sums, blocks)))
        fulmen.attention_backward(*arrays, accumulate=moved, **options)
        for block in blocks:
            self._bring_back(block)
        return sums

    def _got(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {name: self.owner.get(array) for name, array in x.items()}
        return self.owner.get(x)

    def merge(self, parts: Any, **options: Any) -> Any:
        """fulmen.merge."""
        with self.owner.stream():
            moved = [tuple(self.put(x) for x in part) for part in parts]
            return tuple(self.owner.get(x) for x in fulmen.merge(moved, **self.options(options)))

    def append_kv(self, k_pages: Array, v_pages: Array | None, *arrays: Any, **options: Any) -> Any:
        """fulmen.append_kv; the pools have afterwards what their copies have, and the gaps too."""
        with self.owner.stream():
            given = (k_pages, v_pages)  # None: of records
            blocks = {id(root(x)): self._copied(x) for x in given[::-1] if x is not None}
            pools = [None if x is None else self._view(x, blocks[id(root(x))]) for x in given]
            moved = (self._option(x) for x in arrays)
            try:
                q = fulmen.append_kv(*pools, *moved, **self.options(options))
            finally:
                for block in blocks.values():
                    self._bring_back(block)
            return None if q is None else self.owner.get(q)

    def rotary(self, *arrays: Any, **options: Any) -> Array:
        """fulmen.rotary."""
        with self.owner.stream():
            moved = (self.put(x) for x in arrays)
            found: Array = self.owner.get(fulmen.rotary(*moved, **self.options(options)))
        return found

    def mla_indexer(self, *arrays: Any, **options: Any) -> Array:
        """fulmen.mla_indexer."""
        with self.owner.stream():
            moved = (self._option(x) for x in arrays)
            found: Array = self.owner.get(fulmen.mla_indexer(*moved, **self.options(options)))
        return found

    def quantise(self, x: Array, dtype: str, **options: Any) -> Any:
        """fulmen.quantise."""
        with self.owner.stream():
            found = fulmen.quantise(self.put(x), dtype, **self.options(options))
            return found._replace(
                **{name: self.owner.get(y) for name, y in found._asdict().items() if y is not None}
            )

    def hadamard(self, x: Array) -> Array:
        """fulmen.hadamard."""
        with self.owner.stream():
            found: Array = self.owner.get(fulmen.hadamard(self.put(x)))
        return found

    def modified(self) -> str:
        """Which copy of an input was written to; "" for none."""
        for block in self._blocks.values():
            if not np.array_equal(self._bytes_of(block), _bytes(block.around)):
                return f"the copy of an input of shape {block.around.shape} was written to"
        return ""

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options of a call with their arrays moved."""
        return {name: self._option(value) for name, value in given.items()}

    def _option(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.put(value)
        if isinstance(value, Documents):
            kv_ids = None if value.kv_ids is None else self.put(value.kv_ids)
            return Documents(self.put(value.q_ids), kv_ids)
        if isinstance(value, (Score, Expression)):
            moved = {name: self.put(x) for name, x in value.captures.items()}
            return replace(value, captures=moved)
        if isinstance(value, Tree):
            return Tree(self.put(value.words))
        if isinstance(value, Blocks):
            return Blocks(self.put(value.lists), value.size)
        if isinstance(value, tuple) and not all(isinstance(x, (int, float)) for x in value):
            return tuple(self._option(x) for x in value)
        return value

    def put(self, x: Any) -> Any:
        """The copy of an input: made once for all views of the same memory."""
        if not isinstance(x, np.ndarray):
            return x
        if not self.owner.has_strides or x.size == 0:
            return self.owner.contiguous(x)
        around = root(x)
        if not around.flags.c_contiguous:  # rows 2^30 elements apart: only they are copied
            return self.owner.scattered(x)
        block = self._blocks.get(id(around))
        if block is None:
            block = self._blocks[id(around)] = self._copied(x)
        return self._view(x, block)

    def _copied(self, x: Array) -> Block:
        around = root(x)
        first = address(around) % ALIGNMENT
        return Block(around, self.owner.bytes(_bytes(around), first), first)

    def _view(self, x: Array, block: Block) -> Any:
        offset = block.first + address(x) - address(block.around)
        return self.owner.view(block.copy, offset, x)

    def _bytes_of(self, block: Block) -> Array:
        found: Array = self.owner.get(block.copy)
        return found[block.first : block.first + block.around.nbytes]

    def _bring_back(self, block: Block) -> None:
        _bytes(block.around)[...] = self._bytes_of(block)


def _bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.uint8)
