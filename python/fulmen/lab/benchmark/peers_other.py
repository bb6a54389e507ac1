# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sides from other packages, each loaded when it is asked for: FlashAttention-3 and -4, FlashInfer,
xFormers. FlashAttention-3 comes from its package, or from the path of a build of its operators.
"""

from __future__ import annotations

from typing import Any

from .cells import OPTIONS, WINDOW, Cell
from .loading import MissingError, flash_attention_3_operators, load
from .peers_torch import leaves
from .sides import Answer, Side, Tensors, autograd_answer, offsets, on_gpu


def rows_first(tensors: Tensors) -> Tensors:
    """(batch, row, head, dim), contiguous: the axes of the flash-attn family."""
    names = ("q", "k", "v", "do")
    return Tensors(*(getattr(tensors, x).transpose(1, 2).contiguous() for x in names))


def heads_first(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Back to (batch, head, row, dim)."""
    return tuple(x.transpose(1, 2) for x in results)


def _batched(x: Any) -> Any:
    """With an axis for the batch, which packed arrays have not."""
    return x.reshape(-1, *x.shape[-3:])


class FlashAttention3Operators(Side):
    """The operators of FlashAttention-3 from a shared library: no Python between."""

    name = "fa3"
    options = OPTIONS

    def __init__(self, path: str) -> None:
        """From the path of _C.so of flash_attn_3."""
        self.operators = flash_attention_3_operators(path)

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        import torch

        t, scale, ops = rows_first(tensors), cell.dim**-0.5, self.operators
        packed: dict[str, Any] = {}
        left = WINDOW if cell.option == "window" else -1
        if cell.is_joined:
            t, at = Tensors(t.q[0], t.k[0], t.v[0], t.do[0]), on_gpu(offsets(cell))
            longest = max(cell.lengths)
            packed = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": longest,
                      "max_seqlen_k": longest}  # fmt: skip
        lengths = [packed.get(x) for x in ("cu_seqlens_q", "cu_seqlens_k")]
        most = [packed.get(x) for x in ("max_seqlen_q", "max_seqlen_k")]

        def forward() -> Any:
            return ops.fwd(
                t.q, t.k, t.v, softmax_scale=scale, is_causal=cell.causal, window_size_left=left,
                window_size_right=0 if left >= 0 else -1, num_splits=1, **packed,
            )  # fmt: skip

        if cell.op == "forward":
            return Answer(forward, lambda x: heads_first((_batched(x[0]),)), "flash_attn_3")
        o, lse = forward()[:2]

        def backward() -> Any:
            dq, dk, dv = (torch.empty_like(x) for x in (t.q, t.k, t.v))
            ops.bwd(
                t.do, t.q, t.k, t.v, o, lse, dq, dk, dv, *lengths, None, None, *most, scale,
                cell.causal, left, 0 if left >= 0 else -1, 0.0, cell.option == "deterministic", 0,
            )  # fmt: skip
            return dq, dk, dv

        return Answer(
            backward,
            lambda x: heads_first(tuple(map(_batched, x))),
            "flash_attn_3",
        )


class FlashAttention(Side):
    """A package with flash_attn_func: FlashAttention-3 (hopper) or -4 (cute)."""

    def __init__(self, name: str, module: str) -> None:
        """By our name and by its module."""
        self.name = name
        self.module = module
        self.function = load(module).flash_attn_func

    def _forward(self, cell: Cell, *inputs: Any) -> Any:
        o = self.function(*inputs, causal=cell.causal)
        return o[0] if isinstance(o, tuple) else o

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        t = rows_first(tensors)
        if cell.op == "forward":
            return Answer(
                lambda: self._forward(cell, t.q, t.k, t.v),
                lambda o: heads_first((o,)),
                self.module,
            )
        inputs = leaves(t)
        made = autograd_answer(self._forward(cell, *inputs), inputs, t.do, self.module)
        return Answer(made.call, heads_first, self.module)


class FlashInfer(Side):
    """FlashInfer's prefill over ragged sequences; planned outside the timed call."""

    name = "flashinfer"

    def __init__(self) -> None:
        """From its package."""
        self.module = load("flashinfer")

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        import torch

        if cell.op != "forward":
            raise MissingError("it has no backward pass")
        t = rows_first(tensors)
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (t.q, t.k, t.v))
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD")
        offsets = torch.arange(cell.batch + 1, dtype=torch.int32, device=q.device) * cell.rows
        wrapper.plan(
            offsets, offsets, cell.heads, cell.kv_heads, cell.dim, causal=cell.causal,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        shape = t.q.shape
        return Answer(
            lambda: wrapper.run(q, k, v),
            lambda o: heads_first((o.reshape(shape),)),
            "flashinfer ragged prefill",
        )


class Xformers(Side):
    """xFormers' memory_efficient_attention, its own choice of operator."""

    name = "xformers"

    def __init__(self) -> None:
        """From its package."""
        self.ops = load("xformers.ops")

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        t = rows_first(tensors)
        bias = self.ops.LowerTriangularMask() if cell.causal else None

        def forward(*inputs: Any) -> Any:
            return self.ops.memory_efficient_attention(*inputs, attn_bias=bias)

        if cell.op == "forward":
            return Answer(lambda: forward(t.q, t.k, t.v), lambda o: heads_first((o,)), "xformers")
        inputs = leaves(t)
        made = autograd_answer(forward(*inputs), inputs, t.do, "xformers")
        return Answer(made.call, heads_first, "xformers")
