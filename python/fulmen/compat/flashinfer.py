# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers and functions for caches, with its names, arguments and layouts.

    from fulmen.compat import flashinfer
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr, indices, last_page_len, heads, kv_heads, dim, page_size)
    o = wrapper.run(q, kv_cache)

Caches are pairs of (page, row, kv_head, dim) with "NHD", (page, kv_head, row, dim) with "HND", or
one tensor with an axis of two behind the pages. lse is base 2, (row, head), as theirs is. plan
schedules nothing: it keeps what it is given, so that it may also be called once and its tensors
changed in place. The workspace is not used. Refused by name: positional encodings (rotate before),
custom masks that are no drafts (fulmen.masks.tree in fulmen.attention_paged), FP4. Caches of 8 bits
are taken as they are, with k_scale and v_scale of run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fulmen

from ..errors import ArgumentError, UnsupportedError
from .flashinfer_mla import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    append_paged_mla_kv_cache,
)

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]

LOG2E = math.log2(math.e)

# Arguments that choose how theirs computes, and nothing here.
_CHOOSES_NOTHING = {
    "backend", "block_tables", "disable_split_kv", "enable_pdl", "fixed_split_size", "jit_args",
    "jit_kwargs", "kv_data_type", "max_sequence_kv", "max_token_per_sequence", "non_blocking",
    "o_data_type", "q_data_type", "data_type", "rope_scale", "rope_theta",
    "seq_lens", "seq_lens_q", "use_cuda_graph", "use_fp16_qk_reduction", "use_tensor_cores",
}  # fmt: skip


def _checked(given: dict[str, Any], where: str) -> None:
    """Refuses what fulmen would otherwise leave out."""
    mode = given.pop("pos_encoding_mode", "NONE")
    if mode != "NONE":
        raise UnsupportedError(
            f"pos_encoding_mode of {where} is {mode!r}; attention rotates nothing here: rotate q "
            "and k before, and pass 'NONE'"
        )
    for name, value in given.items():
        if name in _CHOOSES_NOTHING or value is None:
            continue
        if name in ("custom_mask", "packed_custom_mask"):
            raise UnsupportedError(
                f"{name} of {where} is given; fulmen.attention_paged takes drafts as "
                "mask=fulmen.masks.tree(words), fulmen.attention any boolean mask"
            )
        raise UnsupportedError(f"{name} of {where} is given; fulmen takes None there")


class _Options(NamedTuple):
    """What a plan says of the scores."""

    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    causal: bool = False

    def of(self, dim: int, factor: float) -> dict[str, Any]:
        """As fulmen has them; the scores are multiplied by `factor` too."""
        scale = 1 / math.sqrt(max(dim, 1)) if self.sm_scale is None else self.sm_scale
        return {
            "scale": scale * factor,
            "window": (self.window_left, 0 if self.causal else -1),
            "softcap": self.logits_soft_cap or 0.0,
            "causal": self.causal,
        }


class _Scales(NamedTuple):
    """Numbers that q, k and v of a run are multiplied by."""

    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None

    @property
    def of_scores(self) -> float:
        return (1.0 if self.q_scale is None else self.q_scale) * (
            1.0 if self.k_scale is None else self.k_scale
        )


def _layout(kv_layout: str) -> str:
    if kv_layout not in ("NHD", "HND"):
        raise ArgumentError(f"kv_layout is {kv_layout!r}; 'NHD' and 'HND' are allowed")
    return kv_layout


def _pools(cache: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """(page, row, kv_head, dim) of keys and of values, from a pair or from one tensor."""
    k, v = cache.unbind(1) if isinstance(cache, Tensor) else cache
    return (k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v)


def _returned(found: Any, scales: _Scales, out: Any, lse: Any, return_lse: bool) -> Any:
    """From (o, lse (head, row)): o, with return_lse also lse (row, head) in base 2."""
    o, natural = found
    if scales.v_scale is not None:
        o = o.mul_(scales.v_scale)
    o = o if out is None else out.copy_(o)
    if not return_lse:
        return o
    base_2 = natural.transpose(0, 1) * LOG2E
    return o, base_2 if lse is None else lse.copy_(base_2)


class _Wrapper:
    """What the wrappers share: where they are, and the pages of the last plan."""

    def __init__(
        self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", *buffers: Any, **rest: Any
    ) -> None:
        """The workspace says the device; buffers for CUDA graphs are not needed."""
        del buffers, rest
        self._kv_layout = _layout(kv_layout)
        self.device = getattr(float_workspace_buffer, "device", None)

    def reset_workspace_buffer(self, *_: Any) -> None:
        """Nothing lies in a workspace."""

    def end_forward(self) -> None:
        """A plan needs no end."""

    def _moved(self, x: Any, device: Any = None) -> Any:
        device = device or self.device
        return x if x is None or device is None else x.to(device)

    def _plan_pages(self, indptr: Any, indices: Any, last_page_len: Any, page_size: int) -> None:
        self._indptr, self._indices = self._moved(indptr), self._moved(indices)
        self._last, self._page_size = self._moved(last_page_len), page_size

    def _caches(self) -> dict[str, Any]:
        """The pages as fulmen.attention_paged has them; nothing is read on the host."""
        pages = self._indptr.diff()
        lengths = torch.where(pages > 0, (pages - 1) * self._page_size + self._last, 0)
        return {
            "page_table": (self._indptr, self._indices),
            "kv_lengths": lengths,
            "max_kv": max(self._indices.numel() * self._page_size, 1),
        }


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """FlashInfer's wrapper of the same name: one query a request."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        *,
        sm_scale: float | None = None,
        **rest: Any,
    ) -> None:
        """Keeps the table: request b has pages indices[indptr[b]:indptr[b + 1]]."""
        del num_qo_heads, num_kv_heads, head_dim
        _checked({"pos_encoding_mode": pos_encoding_mode, **rest}, "plan")
        self._plan_pages(indptr, indices, last_page_len, page_size)
        self._options = _Options(sm_scale, window_left, logits_soft_cap, window_left >= 0)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        """o (batch, head, dim), or (o, lse) of queries (batch, head, dim)."""
        _checked(rest, "run")
        scales = _Scales(q_scale, k_scale, v_scale)
        options = self._options
        if window_left is not None:
            options = options._replace(window_left=window_left, causal=window_left >= 0)
        k, v = _pools(paged_kv_cache, self._kv_layout)
        found = fulmen.attention_paged(
            q[:, None],
            k,
            v,
            **self._caches(),
            layout="bshd",
            sinks=sinks,
            return_lse=True,
            **options.of(q.shape[-1], scales.of_scores),
        )
        plain = found[0][:, 0], found[1][:, :, 0].transpose(0, 1)
        return _returned(plain, scales, out, lse, return_lse)

    forward = run


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """FlashInfer's wrapper of the same name: packed queries over pages."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        **rest: Any,
    ) -> None:
        """Keeps the tables: request b has queries qo_indptr[b] to qo_indptr[b + 1] - 1."""
        del num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, use_fp16_qk_reduction
        masks = {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}
        _checked({"pos_encoding_mode": pos_encoding_mode, **masks, **rest}, "plan")
        self._plan_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._cu_q = self._moved(qo_indptr)
        self._options = _Options(sm_scale, window_left, logits_soft_cap, causal)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        """o (row, head, dim), or (o, lse) of queries (row, head, dim)."""
        _checked(rest, "run")
        scales = _Scales(q_scale, k_scale, v_scale)
        found = self._attended(q, paged_kv_cache, scales.of_scores, window_left, sinks)
        return _returned(found, scales, out, lse, return_lse)

    forward = run

    def _attended(
        self, q: Tensor, cache: Any, factor: float, window_left: int | None, sinks: Any
    ) -> Any:
        """(o, lse (head, row)), the natural logarithm."""
        options = self._options
        if window_left is not None:
            options = options._replace(window_left=window_left)
        k, v = _pools(cache, self._kv_layout)
        return fulmen.attention_paged(
            q,
            k,
            v,
            **self._caches(),
            cu_q=self._cu_q,
            sinks=sinks,
            return_lse=True,
            **options.of(q.shape[-1], factor),
        )


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """FlashInfer's wrapper of the same name: packed queries, packed keys."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        **rest: Any,
    ) -> None:
        """Keeps the offsets."""
        del num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, use_fp16_qk_reduction
        masks = {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}
        _checked({"pos_encoding_mode": pos_encoding_mode, **masks, **rest}, "plan")
        self._cu_q, self._cu_kv = self._moved(qo_indptr), self._moved(kv_indptr)
        self._options = _Options(sm_scale, window_left, logits_soft_cap, causal)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        **rest: Any,
    ) -> Any:
        """o (row, head, dim), or (o, lse)."""
        _checked(rest, "run")
        scales = _Scales(q_scale, k_scale, v_scale)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        options = self._options.of(q.shape[-1], scales.of_scores)
        offsets = self._cu_q, self._cu_kv
        found = fulmen.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
        return _returned(found, scales, out, lse, return_lse)

    forward = run


class MultiLevelCascadeAttentionWrapper:
    """FlashInfer's cascade: keys that many requests share are a level of their own.

    Each level is a call over its pages; the results merge. Only the last level is causal.
    """

    def __init__(
        self, num_levels: int, float_workspace_buffer: Any = None, kv_layout: str = "NHD", *_: Any,
        **__: Any,
    ) -> None:  # fmt: skip
        """With so many levels, from the one that most requests share to their own."""
        if num_levels < 1:
            raise ArgumentError(f"num_levels is {num_levels}; at least 1 is allowed")
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
            for _ in range(num_levels)
        ]

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        **rest: Any,
    ) -> None:
        """Keeps the tables of each level; rest: as the paged prefill."""
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(x) != len(self._levels) for x in tables):
            counts = ", ".join(str(len(x)) for x in tables)
            raise ArgumentError(
                f"lists of {counts} tables are given; there are {len(self._levels)} levels"
            )
        for level, wrapper in enumerate(self._levels):
            is_last = level + 1 == len(self._levels)
            cu_q, indptr, indices, last_page_len = (x[level] for x in tables)
            rest.update(causal=causal and is_last)
            wrapper.plan(cu_q, indptr, indices, last_page_len, num_qo_heads, num_kv_heads,
                         head_dim, page_size, **rest)  # fmt: skip

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Any, **rest: Any) -> Tensor:
        """o (row, head, dim)."""
        _checked(rest, "run")
        parts = [x._attended(q, paged_kv_cache, 1.0, None, None) for x in self._levels]
        o: Tensor = fulmen.merge(parts, layout="shd")[0]
        return o

    forward = run


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """o (q_row, head, dim), or (o, lse (q_row, head) in base 2); custom_mask replaces causal."""
    del use_fp16_qk_reduction, rope_scale, rope_theta, backend
    given = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v, "o_dtype": o_dtype}
    given["packed_custom_mask"] = packed_custom_mask
    _checked({"pos_encoding_mode": pos_encoding_mode, **given}, "single_prefill_with_kv_cache")
    if _layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    causal = causal and custom_mask is None
    options = _Options(sm_scale, window_left, logits_soft_cap, causal).of(q.shape[-1], 1.0)
    mask = None if custom_mask is None else custom_mask.bool()
    found = fulmen.attention(q, k, v, layout="shd", mask=mask, return_lse=True, **options)
    return _returned(found, _Scales(), None, None, return_lse)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """o (head, dim) of one query (head, dim), or (o, lse (head,) in base 2)."""
    del use_tensor_cores, rope_scale, rope_theta
    _checked({"pos_encoding_mode": pos_encoding_mode}, "single_decode_with_kv_cache")
    if _layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    scales = _Scales(q_scale, k_scale, v_scale)
    given = _Options(sm_scale, window_left, logits_soft_cap, window_left >= 0)
    options = given.of(q.shape[-1], scales.of_scores)
    found = fulmen.attention(q[None], k, v, layout="shd", return_lse=True, **options)
    returned = _returned(found, scales, None, None, return_lse)
    return tuple(x[0] for x in returned) if return_lse else returned[0]


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(row, head, dim) and (row, head) from parts (row, part, head, dim) and (row, part, head)."""
    parts = [(o, x.transpose(0, 1) / LOG2E) for o, x in zip(v.unbind(1), s.unbind(1))]
    o, lse = fulmen.merge(parts, layout="shd")
    return o, lse.transpose(0, 1) * LOG2E


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new rows (row, kv_head, dim) into the cache: each behind so many keys of its request.

    Nothing is read by the host. kv_last_page_len says nothing that positions do not.
    """
    k, v = _pools(paged_kv_cache, _layout(kv_layout))
    size = k.shape[1]
    place = kv_indptr[batch_indices.long()] + positions // size
    slots = kv_indices[place.long()].long() * size + positions % size
    cu_new = torch.arange(2, device=slots.device, dtype=torch.int64) * len(append_key)
    fulmen.append_kv(k, v, append_key, append_value, slots, cu_new=cu_new, layout="shd")


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int
) -> tuple[Tensor, Tensor]:
    """Of `nnz` new rows, the request of each and its place among the keys of that request.

    Args:
        append_indptr: (request + 1,): request r has rows append_indptr[r] to append_indptr[r + 1].
        seq_lens: (request,): keys of each, new ones included.
        nnz: the last of append_indptr.
    """
    counts = append_indptr[1:] - append_indptr[:-1]
    requests = torch.arange(len(counts), device=counts.device, dtype=counts.dtype)
    batch_indices = requests.repeat_interleave(counts, output_size=nnz)
    behind = (seq_lens - append_indptr[1:])[batch_indices.long()]
    rows = torch.arange(nnz, device=counts.device, dtype=counts.dtype)
    return batch_indices.int(), (rows + behind).int()


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts (row, head, dim) with lse (row, head) in base 2, merged."""
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merges the other part into v and s; where mask (row,) is False nothing changes."""
    o, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        o, lse = torch.where(mask[:, None, None], o, v), torch.where(mask[:, None], lse, s)
    v.copy_(o)
    s.copy_(lse)
