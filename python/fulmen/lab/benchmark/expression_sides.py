# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Who answers a cell of a caller's own score or mask, its arrays, and the truth in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import fulmen

from .cells import BLOCK_ROWS, DOCUMENT, SAMPLED_ROWS
from .expression_cells import (
    BLOCK,
    CHUNKS,
    DENSITIES,
    REACH,
    VARIANTS,
    Captures,
    ExpressionCell,
    Keywords,
    as_text,
    mask_mod,
    score_mod,
)
from .sides import Answer, Side, autograd_answer, random_tensors


def random_captures(cell: ExpressionCell, torch: Any, device: str) -> Captures:
    """The same in every run of a cell."""
    t = random_tensors(cell, torch, device)
    source = torch.Generator(device).manual_seed(1)
    table = torch.randn(cell.heads, 2 * REACH + 1, generator=source, device=device)
    slope = 2.0 ** -(8 * torch.arange(1, cell.heads + 1, device=device) / cell.heads)
    document = torch.arange(cell.rows, device=device, dtype=torch.int32) // DOCUMENT
    cuts = torch.arange(CHUNKS + 1, device=device, dtype=torch.int32) * cell.rows // CHUNKS
    segments = torch.stack((cuts[:-1], cuts.diff(), cuts[:-1]), dim=-1)
    lists = None
    if cell.option in DENSITIES:
        lists = torch.tensor([cell.lists()], dtype=torch.int32, device=device)
    return Captures(t.q, t.k, t.v, t.do, slope, document, table, segments, lists)


class FulmenExpression(Side):
    """The public functions of this package, with a text or with the option that means the same."""

    options = VARIANTS

    def __init__(
        self, implementation: str, name: str = "fulmen", keywords: Callable[..., Keywords] = as_text
    ) -> None:
        """keywords: what a variant is as keywords of a call."""
        self.asked = implementation
        self.name = name
        self.keywords = keywords

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t, options = tensors, {**self.keywords(cell, tensors), "implementation": self.asked}
        reads_table = cell.option == "relative" and "score" in options
        need = ("q", "k", "v", *(("table",) if reads_table else ()))
        wanted = need if cell.op == "backward" else ()
        plan = fulmen.plan(t.q, t.k, t.v, need=wanted, **options)
        chosen = plan.explain(cell.op)["implementation"]
        beside = (chosen, plan.workspace_bytes)
        if cell.op == "forward":
            return Answer(
                lambda: fulmen.attention(t.q, t.k, t.v, **options), lambda o: (o,), *beside
            )
        made = fulmen.attention_forward(t.q, t.k, t.v, **options)

        def backward() -> Any:
            saved = (t.q, t.k, t.v, made.o, made.stats)
            return fulmen.attention_backward(t.do, *saved, need=need, **options)

        return Answer(backward, lambda g: (g.dq, g.dk, g.dv), *beside)


class FlexExpression(Side):
    """torch's flex_attention, compiled: by Triton, or with another `BACKEND`."""

    options = VARIANTS

    def __init__(self, name: str = "flex", backend: str | None = None) -> None:
        """backend: None: torch's choice, Triton."""
        self.name = name
        self.kernel_options = None if backend is None else {"BACKEND": backend}

    def answer(self, cell: Any, tensors: Any) -> Answer:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        t = tensors
        inputs = [x.detach() for x in (t.q, t.k, t.v)]
        read = t
        if cell.op == "backward":
            inputs = [x.requires_grad_() for x in inputs]
            if cell.option == "relative":
                table = t.table.detach().requires_grad_()
                read = Captures(**{**vars(t), "table": table})
        given = {
            "score_mod": score_mod(cell, read),
            "block_mask": self._block_mask(cell, t),
            "kernel_options": self.kernel_options,
        }
        compiled = torch.compile(flex_attention, dynamic=False)
        if cell.op == "forward":
            q, k, v = inputs
            return Answer(lambda: compiled(q, k, v, **given), lambda o: (o,), "flex_attention")
        o = compiled(*inputs, **given)
        leaves = (*inputs, read.table) if read is not t else tuple(inputs)
        answer = autograd_answer(o, leaves, t.do, "flex_attention")
        answer.results = lambda g: g[:3]
        return answer

    def _block_mask(self, cell: ExpressionCell, t: Captures) -> Any:
        import torch
        from torch.nn.attention.flex_attention import BlockMask, create_block_mask

        if t.lists is not None:
            counts = torch.full_like(t.lists[..., 0], t.lists.shape[-1])
            room = torch.zeros(2 * counts.shape[-1:], dtype=counts.dtype, device=counts.device)
            room = room.expand(*counts.shape[:2], -1, -1)  # a place for each block of keys
            listed = torch.cat((t.lists, room[..., t.lists.shape[-1] :]), -1)
            return BlockMask.from_kv_blocks(
                torch.zeros_like(counts), room.contiguous(), counts, listed,
                BLOCK_SIZE=BLOCK, seq_lengths=(cell.rows, cell.rows),
            )  # fmt: skip
        mod = mask_mod(cell, t)
        if mod is None:
            return None
        return create_block_mask(mod, None, None, cell.rows, cell.rows, t.q.device)


class ExpressionTruth:
    """Results of one head in float64, by FlexAttention's functions of whole blocks of rows."""

    def __init__(self, cell: ExpressionCell, t: Captures, torch: Any) -> None:
        """Computed where the tensors are; gradients by autograd."""
        choose = random.Random(cell.name)
        self.head = choose.randrange(cell.heads)
        self.rows = sorted(choose.sample(range(cell.rows), min(SAMPLED_ROWS, cell.rows)))
        wide = Captures(**{**vars(t), "slope": t.slope.double(), "table": t.table.double()})
        q, k, v, do = (x[0, self.head].double() for x in (t.q, t.k, t.v, t.do))
        leaves = [x.requires_grad_(cell.op == "backward") for x in (q, k, v)]
        found, sums = [], [torch.zeros_like(x) for x in leaves]
        for first in range(0, cell.rows, BLOCK_ROWS):
            at = slice(first, min(first + BLOCK_ROWS, cell.rows))
            with torch.set_grad_enabled(cell.op == "backward"):
                o = torch.softmax(self._scores(cell, wide, q[at] @ k.T, at, torch), -1) @ v
            if cell.op == "forward":
                found.append(o)
                continue
            parts = torch.autograd.grad(o, leaves, do[at])
            sums = [total + part for total, part in zip(sums, parts)]
        self.results = (torch.cat(found),) if found else tuple(sums)

    def _scores(self, cell: ExpressionCell, t: Captures, s: Any, at: slice, torch: Any) -> Any:
        s = s / math.sqrt(cell.dim)
        i = torch.arange(at.start, at.stop, device=s.device)[:, None]
        j = torch.arange(cell.rows, device=s.device)[None]
        mod, visible = score_mod(cell, t), mask_mod(cell, t)
        if mod is not None:
            s = mod(s, 0, self.head, i, j)
        if visible is not None:
            s = s.masked_fill(~visible(0, self.head, i, j), -math.inf)
        if t.lists is not None:
            listed = torch.zeros(2 * (cell.rows // BLOCK,), dtype=torch.bool, device=s.device)
            listed.scatter_(1, t.lists[0, self.head].long(), True)
            s = s.masked_fill(~listed[i // BLOCK, j // BLOCK], -math.inf)
        return s

    def error(self, got: tuple[Any, ...]) -> float:
        """The largest |x - truth| over the sampled rows; NaN where a result is not finite."""
        errors = [
            abs(x[0, self.head][self.rows].double() - truth[self.rows]).max()
            for x, truth in zip(got, self.results)
        ]
        return max(map(float, errors), key=lambda x: (x != x, x))
