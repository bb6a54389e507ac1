# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What answers a cell of caches beside fulmen: torch's attention, FlashAttention, FlashInfer.

Each is called as its own documentation says for such caches: with lengths where they differ, with
as many splits of the keys as it thinks best, and with everything that may be planned planned
outside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .cache_cells import CacheCell
from .loading import MissingError, flash_attention_3_operators, load, torch_attention
from .sides import Answer, Side

if TYPE_CHECKING:
    from .cache_sides import Caches

WORKSPACE = 256 << 20  # bytes that FlashInfer asks for


class SdpaCaches(Side):
    """torch's scaled_dot_product_attention over contiguous caches of one length."""

    def __init__(self, name: str, backend: str) -> None:
        """By our name and by torch's."""
        self.name = name
        self.backend = backend

    def answer(self, cell: Any, tensors: Any) -> Answer:
        if cell.page:
            raise MissingError("it takes no table of pages")
        if not cell.is_even:
            raise MissingError("it takes no lengths")
        if cell.causal:
            raise MissingError("its causal mask begins at the first key")
        q, k, v = (x.transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
        forward = torch_attention(self.backend, False, cell.heads != cell.kv_heads)
        return Answer(lambda: forward(q, k, v), lambda o: (o.transpose(1, 2),), self.name)


class GroupedSdpaCaches(Side):
    """The same with the heads of a group as rows of one: each key is read once."""

    name = "torch grouped"

    def answer(self, cell: Any, tensors: Any) -> Answer:
        if cell.page or not cell.is_even or cell.rows > 1:
            raise MissingError("it takes one row over contiguous caches of one length")
        shape = tensors.q.shape
        q = tensors.q.reshape(cell.batch, cell.kv_heads, -1, cell.dim)
        k, v = (x.transpose(1, 2) for x in (tensors.k, tensors.v))
        forward = torch_attention("FLASH_ATTENTION", False, False)
        return Answer(lambda: forward(q, k, v), lambda o: (o.reshape(shape),), self.name)


class FlashAttention3Caches(Side):
    """FlashAttention-3 over caches, from its package or the path of its operators.

    With metadata its scheduler's part is computed outside the timed call.
    """

    def __init__(self, path: str | None, metadata: bool) -> None:
        """From the path of _C.so of flash_attn_3; None: flash_attn_interface."""
        self.name = "fa3+meta" if metadata else "fa3"
        self.metadata = metadata
        if path is None:
            module = load("flash_attn_interface")
            self._forward: Callable[..., Any] = self._of_package(module)
            self._schedule: Callable[..., Any] = self._schedule_of_package(module)
        else:
            operators = flash_attention_3_operators(path)
            self._forward = self._of_operators(operators)
            self._schedule = self._schedule_of_operators(operators)

    def answer(self, cell: Any, tensors: Any) -> Answer:
        given: dict[str, Any] = {}
        if self.metadata:
            given["scheduler_metadata"] = self._schedule(cell, tensors)
        return Answer(lambda: self._forward(cell, tensors, **given), lambda o: (o,), "flash_attn_3")

    @staticmethod
    def _of_package(module: Any) -> Callable[..., Any]:
        def forward(cell: CacheCell, t: Caches, **given: Any) -> Any:
            o = module.flash_attn_with_kvcache(
                t.q, t.k, t.v, cache_seqlens=t.lengths, page_table=t.table, causal=cell.causal,
                cu_seqlens_q=t.cu_q, max_seqlen_q=most_rows(cell), **given,
            )  # fmt: skip
            return o[0] if isinstance(o, tuple) else o

        return forward

    @staticmethod
    def _schedule_of_package(module: Any) -> Callable[..., Any]:
        def schedule(cell: CacheCell, t: Caches) -> Any:
            return module.get_scheduler_metadata(
                cell.batch, cell.rows, longest(cell), cell.heads, cell.kv_heads, cell.dim,
                t.lengths, t.q.dtype, cu_seqlens_q=t.cu_q, page_size=cell.page or None,
                causal=cell.causal,
            )  # fmt: skip

        return schedule

    @staticmethod
    def _of_operators(operators: Any) -> Callable[..., Any]:
        def forward(cell: CacheCell, t: Caches, **given: Any) -> Any:
            return operators.fwd(
                t.q, t.k, t.v, softmax_scale=cell.dim**-0.5, is_causal=cell.causal,
                window_size_left=-1, window_size_right=-1, num_splits=0, seqused_k=t.lengths,
                page_table=t.table, cu_seqlens_q=t.cu_q, max_seqlen_q=most_rows(cell), **given,
            )[0]  # fmt: skip

        return forward

    @staticmethod
    def _schedule_of_operators(operators: Any) -> Callable[..., Any]:
        def schedule(cell: CacheCell, t: Caches) -> Any:
            return operators.get_scheduler_metadata(
                cell.batch, cell.rows, longest(cell), cell.heads, cell.kv_heads, cell.dim,
                cell.dim, t.q.dtype, t.lengths, t.cu_q, None, None, None, None,
                cell.page or None, 0, cell.causal, -1, -1, 0, False, 0, None, 0,
            )  # fmt: skip

        return schedule


def most_rows(cell: CacheCell) -> int | None:
    """Of a packed request; None where queries are not packed."""
    return cell.rows if cell.q_lengths else None


def longest(cell: CacheCell) -> int:
    """Keys that a row of the table has room for."""
    return max(cell.pages) * cell.page if cell.page else cell.kv_rows


class FlashAttention2Caches(Side):
    """flash_attn_with_kvcache of the package flash-attn; its pages have a multiple of 256 rows."""

    name = "flash-attn"

    def __init__(self) -> None:
        """From its package."""
        self.function = load("flash_attn").flash_attn_with_kvcache

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t, function = tensors, self.function
        if cell.q_lengths:
            raise MissingError("its caches take no packed queries")
        return Answer(
            lambda: function(
                t.q, t.k, t.v, cache_seqlens=t.lengths, block_table=t.table, causal=cell.causal
            ),
            lambda o: (o,),
            "flash_attn",
        )


class FlashAttention4Caches(Side):
    """FlashAttention-4 (flash_attn.cute)."""

    name = "fa4"

    def __init__(self) -> None:
        """From its package."""
        self.module = load("flash_attn.cute")

    def answer(self, cell: Any, tensors: Any) -> Answer:
        t, module = tensors, self.module
        if cell.page:

            def call() -> Any:
                return module.flash_attn_varlen_func(
                    t.q, t.k, t.v, cu_seqlens_q=t.cu_q, max_seqlen_q=most_rows(cell),
                    seqused_k=t.lengths, page_table=t.table, causal=cell.causal,
                    max_seqlen_k=cell.kv_rows,
                )  # fmt: skip

        elif cell.is_even:

            def call() -> Any:
                return module.flash_attn_func(t.q, t.k, t.v, causal=cell.causal)

        else:
            raise MissingError("it takes lengths with pages alone")
        return Answer(call, lambda o: (o[0] if isinstance(o, tuple) else o,), "flash_attn.cute")


class FlashInferCaches(Side):
    """FlashInfer's wrappers over pages: decoding with its tensor cores, and prefill for drafts."""

    name = "flashinfer"
    options = ("", "float8_e4m3fn", "float8_e5m2")

    def __init__(self) -> None:
        """From its package."""
        self.module = load("flashinfer")

    def answer(self, cell: Any, tensors: Any) -> Answer:
        torch: Any = import_module("torch")
        if not cell.page:
            raise MissingError("its caches are in pages")
        t, shape = tensors, tensors.q.shape
        scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=t.q.device)
        last = (t.lengths - 1) % cell.page + 1
        common = (t.indptr, t.pages, last, cell.heads, cell.kv_heads, cell.dim, cell.page)
        dtypes = {"q_data_type": t.q.dtype, "kv_data_type": t.k.dtype}
        if cell.rows == 1:
            wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
                scratch, "NHD", use_tensor_cores=True, backend="fa2"
            )
            wrapper.plan(*common, **dtypes)
        else:
            wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="fa2")
            rows = torch.arange(cell.batch + 1, dtype=torch.int32, device=t.q.device) * cell.rows
            rows = rows if t.cu_q is None else t.cu_q
            wrapper.plan(rows, *common, causal=cell.causal, **dtypes)
        q = t.q.reshape(-1, *shape[-2:])
        scale = None if t.scale is None else float(t.scale[0])
        return Answer(
            lambda: wrapper.run(q, (t.k, t.v), k_scale=scale, v_scale=scale),
            lambda o: (o.reshape(shape),),
            "flashinfer fa2",
        )


class FlashInferCascade(Side):
    """FlashInfer's cascade: the shared pages are a level of their own."""

    name = "flashinfer cascade"

    def __init__(self) -> None:
        """From its package."""
        self.wrapper = load("flashinfer").MultiLevelCascadeAttentionWrapper

    def answer(self, cell: Any, tensors: Any) -> Answer:
        torch: Any = import_module("torch")
        if not cell.shared or cell.rows > 1:
            raise MissingError("it takes one row over shared pages")
        t, common = tensors, cell.shared // cell.page
        scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=t.q.device)

        def integers(x: list[int]) -> Any:
            return torch.tensor(x, dtype=torch.int32, device=t.q.device)

        own = [count - common for count in cell.pages]
        last = (t.lengths - 1) % cell.page + 1
        wrapper = self.wrapper(2, scratch, "NHD")
        wrapper.plan(
            [integers([0, cell.batch]), integers([*range(cell.batch + 1)])],
            [integers([0, common]), integers([0, *accumulate(own)])],
            [t.table[0, :common].contiguous(), torch.cat([
                row[common:count] for row, count in zip(t.table, cell.pages)])],
            [integers([cell.page]), last],
            cell.heads, cell.kv_heads, cell.dim, cell.page, q_data_type=t.q.dtype,
        )  # fmt: skip
        q, shape = t.q.flatten(0, 1), t.q.shape
        return Answer(
            lambda: wrapper.run(q, (t.k, t.v)), lambda o: (o.reshape(shape),), "flashinfer fa2"
        )


class CudnnPages(Side):
    """cuDNN over pages with the heads outside, through FlashInfer and cudnn-frontend."""

    name = "cudnn-paged"

    def __init__(self) -> None:
        """From FlashInfer's package."""
        self.function = load("flashinfer.cudnn").cudnn_batch_decode_with_kv_cache

    def answer(self, cell: Any, tensors: Any) -> Answer:
        torch: Any = import_module("torch")
        if not cell.page:
            raise MissingError("its caches are in pages")
        if cell.rows > 1:
            raise MissingError("it decodes one row a request")
        t, scale = tensors, cell.dim**-0.5
        scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=t.q.device)
        q, lengths, shape = t.q.flatten(0, 1), t.lengths.view(-1, 1, 1, 1), t.q.shape
        k, v = (x.transpose(1, 2).contiguous() for x in (t.k, t.v))
        return Answer(
            lambda: self.function(
                q, k, v, scale, scratch, max_sequence_kv=longest(cell),
                actual_seq_lens_kv=lengths, block_tables=t.table, is_cuda_graph_compatible=True,
            ),
            lambda o: ((o[0] if isinstance(o, tuple) else o).reshape(shape),),
            "cudnn-frontend",
        )  # fmt: skip
