# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sides that come with PyTorch: its attention by backend, flex_attention, and the naive way."""

from __future__ import annotations

from typing import Any

from .cells import Cell
from .loading import MissingError, first_line, torch_attention
from .sides import NAIVE_BYTES, Answer, Side, Tensors, autograd_answer


def rows_outside(x: Any) -> Any:
    """The same numbers with the heads of a row side by side, as models have them.

    torch copies the gradient of o to this layout before it calls FlashAttention-2.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def leaves(tensors: Tensors) -> tuple[Any, Any, Any]:
    """Inputs that autograd records."""
    q, k, v = (x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    return q, k, v


class Sdpa(Side):
    """torch's scaled_dot_product_attention through one of its backends."""

    options = ("", "grouped", "huge")

    def __init__(self, name: str, backend: str) -> None:
        """By our name and by torch's."""
        self.name = name
        self.backend = backend

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        import torch

        forward = torch_attention(self.backend, cell.causal, cell.heads != cell.kv_heads)
        try:
            if cell.op == "forward":
                q, k, v = tensors.q, tensors.k, tensors.v
                with torch.no_grad():
                    forward(q, k, v)
                return Answer(lambda: forward(q, k, v), lambda o: (o,), self.name)
            moved = Tensors(*map(rows_outside, (tensors.q, tensors.k, tensors.v, tensors.do)))
            inputs = leaves(moved)
            return autograd_answer(forward(*inputs), inputs, moved.do, self.name)
        except RuntimeError as error:
            raise MissingError(first_line(error)) from error


class Flex(Side):
    """torch's flex_attention, compiled; each cell takes seconds of Triton first."""

    name = "flex"

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        blocks = None
        if cell.causal:
            blocks = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, cell.rows, cell.rows, tensors.q.device
            )
        if cell.op == "forward":
            q, k, v = tensors.q, tensors.k, tensors.v
            return Answer(
                lambda: compiled(q, k, v, block_mask=blocks), lambda o: (o,), "flex_attention"
            )
        inputs = leaves(tensors)
        o = compiled(*inputs, block_mask=blocks)
        return autograd_answer(o, inputs, tensors.do, "flex_attention")


class NaiveTorch(Side):
    """softmax(q k^T) v with the whole score matrix in memory: what the others save."""

    name = "naive"

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        import torch

        matrix = cell.batch * cell.heads * cell.rows * cell.rows * tensors.q.element_size()
        if 3 * matrix > NAIVE_BYTES:
            raise MissingError(f"its score matrices would take {3 * matrix / 2**30:.0f} GiB")
        hidden = None
        if cell.causal:
            every = torch.ones(cell.rows, cell.rows, dtype=torch.bool, device=tensors.q.device)
            hidden = every.triu(1)

        def forward(q: Any, k: Any, v: Any) -> Any:
            s = (q * cell.dim**-0.5) @ k.transpose(-1, -2)
            if hidden is not None:
                s = s.masked_fill(hidden, float("-inf"))
            return torch.softmax(s, -1) @ v

        if cell.op == "forward":
            q, k, v = tensors.q, tensors.k, tensors.v
            return Answer(lambda: forward(q, k, v), lambda o: (o,), "torch")
        inputs = leaves(tensors)
        return autograd_answer(forward(*inputs), inputs, tensors.do, "torch")
