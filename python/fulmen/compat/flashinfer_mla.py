# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers and function for latent attention (flashinfer.mla), with its arguments.

ckv_cache (page, row, 512) and kpe_cache (page, row, 64) are the two parts of one cache of 576
numbers a row, as vLLM and SGLang allocate them: views whose rows lie one behind the other. lse is
base 2 unless `return_lse_base_on_e` says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fulmen

from ..errors import ArgumentError, UnsupportedError

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "append_paged_mla_kv_cache",
]

LOG2E = math.log2(math.e)


def _one_cache(ckv: Tensor, kpe: Tensor) -> Tensor:
    """(page, row, 1, 576) of the two parts of a cache.

    Raises:
        UnsupportedError: they are not two parts of the same rows.
    """
    latent, size = ckv.shape[-1], ckv.element_size()
    is_one = (
        ckv.dtype == kpe.dtype
        and ckv.shape[:2] == kpe.shape[:2]
        and ckv.stride() == kpe.stride()
        and ckv.stride(-1) == 1
        and kpe.data_ptr() - ckv.data_ptr() == latent * size
    )
    if not is_one:
        raise UnsupportedError(
            "ckv_cache and kpe_cache are two arrays; fulmen reads a row of the cache once: "
            f"allocate (page, row, {latent + kpe.shape[-1]}) and pass cache[..., :{latent}] and "
            f"cache[..., {latent}:]"
        )
    shape = (*ckv.shape[:2], 1, latent + kpe.shape[-1])
    return ckv.as_strided(shape, (*ckv.stride()[:2], 0, 1))


class BatchMLAPagedAttentionWrapper:
    """FlashInfer's wrapper of the same name: absorbed queries over pages of latent rows."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        """The workspace says the device; buffers for CUDA graphs are not needed."""
        del use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend
        self.device = getattr(float_workspace_buffer, "device", None)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
    ) -> None:
        """Keeps the tables: request b has queries qo_indptr[b] to qo_indptr[b + 1] - 1 and
        kv_len_arr[b] keys on pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        """
        del num_heads, head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type, use_profiler
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        moved = [x if self.device is None else x.to(self.device) for x in given]
        self._cu_q, self._indptr, self._indices, self._lengths = moved
        self._options = {
            "causal": causal, "scale": sm_scale,
            "max_kv": max(kv_indices.numel() * page_size, 1),
        }  # fmt: skip

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        """o (row, head, 512), or (o, lse (row, head)), of q_nope (row, head, 512) and q_pe.

        Raises:
            ArgumentError: kv_len or page_table is given: they are of plan.
            UnsupportedError: the caches are not two parts of one.
            fulmen.Error: as `fulmen.attention_mla`.
        """
        del profiler_buffer
        if kv_len is not None or page_table is not None:
            name = "page_table" if kv_len is None else "kv_len"
            raise ArgumentError(f"{name} is given to run; plan takes the pages and their keys")
        cache = _one_cache(ckv_cache, kpe_cache)
        o, natural = fulmen.attention_mla(
            torch.cat([q_nope, q_pe], dim=-1), cache, (self._indptr, self._indices), self._lengths,
            dim_v=ckv_cache.shape[-1], cu_q=self._cu_q, return_lse=True, **self._options,
        )  # fmt: skip
        o = o if out is None else out.copy_(o)
        if not return_lse:
            return o
        sums = natural.transpose(0, 1) * (1.0 if return_lse_base_on_e else LOG2E)
        return o, sums if lse is None else lse.copy_(sums)

    forward = run


class BatchDecodeMlaWithPagedKVCacheWrapper:
    """FlashInfer's wrapper of the same name: one absorbed query a request."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:
        """The workspace says the device; buffers for CUDA graphs are not needed."""
        del use_cuda_graph, use_tensor_cores, paged_kv_indptr_buffer, paged_kv_indices_buffer
        del paged_kv_last_page_len_buffer
        self._wrapper = BatchMLAPagedAttentionWrapper(float_workspace_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: Any = None,
        q_data_type: Any = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Request b has (pages - 1) page_size + last_page_len[b] keys on pages
        indices[indptr[b]:indptr[b + 1]]. Rotary parts come rotated, as there.

        Raises:
            UnsupportedError: rope_scale or rope_theta is given.
        """
        for name, given in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
            if given is not None:
                raise UnsupportedError(
                    f"{name} is {given}; nothing rotates here: rotate q_pe by fulmen.rotary, and "
                    "rows of the cache as they are appended"
                )
        pages = indptr[1:] - indptr[:-1]
        lengths = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
        rows = torch.arange(len(indptr), dtype=indptr.dtype, device=indptr.device)
        self._wrapper.plan(
            rows, indptr, indices, lengths.to(indptr.dtype), num_qo_heads, head_dim_compressed_kv,
            0, page_size, False, sm_scale, q_data_type, data_type,
        )  # fmt: skip
        if window_left >= 0:
            self._wrapper._options["window"] = (window_left, 0)
        if logits_soft_cap:
            self._wrapper._options["softcap"] = logits_soft_cap

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        paged_ckv_cache: Tensor,
        paged_kpe_cache: Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Any:
        """o (request, head, 512), or (o, lse (request, head) of base 2).

        Raises:
            UnsupportedError: the caches are not two parts of one; a scale is not 1.
            fulmen.Error: as `fulmen.attention_mla`.
        """
        del enable_pdl
        for name, given in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if given not in (None, 1):
                raise UnsupportedError(
                    f"{name} is {given}; scales of numbers of 16 bits are left out: fold q_scale "
                    "and k_scale into sm_scale of plan, and multiply the result by v_scale"
                )
        return self._wrapper.run(
            q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out=out, lse=lse, return_lse=return_lse
        )

    forward = run


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Writes new rows (row, 512) and (row, 64) into the cache, behind so many of their request.

    Nothing is read by the host. kv_last_page_len says nothing that positions do not.
    """
    del kv_last_page_len
    size = ckv_cache.shape[1]
    place = kv_indptr[batch_indices.long()] + positions // size
    slots = kv_indices[place.long()].long() * size + positions % size
    cu_new = torch.arange(2, device=slots.device, dtype=torch.int64) * len(append_ckv)
    fulmen.append_kv(
        ckv_cache[:, :, None], kpe_cache[:, :, None], append_ckv[:, None], append_kpe[:, None],
        slots, cu_new=cu_new, layout="shd",
    )  # fmt: skip
