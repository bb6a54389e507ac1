# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention over caches: keys and values in pages, found through a table of each request.

Key j of request b is row j % page_size of page page_table[b, j // page_size]. The method is that of
Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
(2023), section 4. The call is `fulmen.attention` with more arrays; it has no backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .array_types import Array
from .functional import attention
from .keywords import PagedOptions, takes
from .page_tables import cache_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(PagedOptions)
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Any,
    kv_lengths: Array,
    *,
    cu_q: Array = None,
    positions: Array = None,
    batch_index: Array = None,
    kv_start: Array = None,
    kv_shared: Array = None,
    return_lse: bool = False,
    out: Array = None,
    out_dtype: Any = None,
    **options: Unpack[PagedOptions],
) -> Any:
    """Attention of queries over caches in pages: decode, drafts, chunks of prompts, all at once.

    Lengths, tables and offsets are read where the call runs, never by the host: they may change
    between replays of a CUDA graph and between runs of a plan. Rows of a page past a length are
    never read, nor entries of the table past the last page of a request: both may hold anything.

    Args:
        q: (batch, head, q_row, dim_qk) in the order that `layout` names; with cu_q (total_q, head,
            dim_qk). The last query of a request is level with its last key.
        k_pages: the pool of keys. (page, kv_head, row, dim_qk) with layout "bhsd" and "hsd"; (page,
            row, kv_head, dim_qk) with "bshd" and "shd", as packed queries are by default. Any page
            size from 1, any strides.
        v_pages: the pool of values, likewise with dim_v; its strides are its own.
        page_table: (batch, page) int32 or int64, the pages of each request in order; or a tuple
            (indptr, indices): request b has indices[indptr[b]:indptr[b + 1]], and max_kv= is
            needed; or None: k_pages and v_pages are contiguous caches, one entry a request.
        kv_lengths: (batch,) keys of each request, those of this call's queries included.
        cu_q: (batch + 1,): packed queries: request b owns rows cu_q[b] to cu_q[b + 1] - 1.
        positions: (batch, q_row), or packed (total_q,): where each query stands among the keys, for
            causal, window, chunks and ALiBi; None: the last query is level with the last key.
        batch_index: (batch,): contiguous caches: which entry of k_pages and v_pages each request
            has; beside page_table=None.
        kv_start: (batch,): left padding: keys below it are hidden and positions count from it.
        kv_shared: (batch,) or (1,), or an int: so many first keys of each request lie in the same
            pages of page_table as those of the first request that has any. o is the same without
            it; a GPU then reads them once for all requests. Read where the call runs, as lengths
            are: as far as the fewest that a request names, and as all its queries stand behind.
        return_lse: return (o, lse).
        out: as in `attention`.
        out_dtype: as in `attention`.
        **options: those of `attention`. mask=fulmen.masks.tree(words) are drafts that branch. A
            bias or a mask counts keys by their number in the request and reaches to max_kv, or to
            the width of the table times the page size. slots=True: page_table has a row of the
            pools for each key instead, page * page size + row, in any order, -1 where the key is
            hidden: sparse attention, one request for each query row; as `attention_mla` with
            indices.

    Returns:
        As `attention`. A request of length 0 has o = 0 and lse = -inf.

    Raises:
        fulmen.Error: as `attention`; on the CPU ArgumentError for a length, an offset or a page
            that is out of range. On a GPU such a request counts as empty, and
            `fulmen.device_faults` tells.
        UnsupportedError: a tensor that requires grad.

    >>> import numpy as np, fulmen
    >>> pool = np.arange(24, dtype=np.float32).reshape(3, 1, 4, 2)  # 3 pages of 4 rows
    >>> q = np.zeros((1, 1, 1, 2), np.float32)
    >>> fulmen.attention_paged(q, pool, pool, [[2, 0]], [5])[0, 0]  # page 2, then a row of page 0
    array([[15.2, 16.2]], dtype=float32)
    """
    given = cache_keywords(
        page_table, kv_lengths, cu_q, positions, batch_index, kv_start, kv_shared
    )
    if return_lse is not False:
        given["return_lse"] = return_lse
    for name, x in (("out", out), ("out_dtype", out_dtype)):
        if x is not None:
            given[name] = x
    return attention(q, k_pages, v_pages, **given, **options)
