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
from .errors import ArgumentError, ShapeError
from .functional import attention
from .keywords import PagedOptions, takes
from .page_tables import table_keywords

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
        return_lse: return (o, lse).
        out: as in `attention`.
        out_dtype: as in `attention`.
        **options: those of `attention`. mask=fulmen.masks.tree(words) are drafts that branch. A
            bias or a mask counts keys by their number in the request and reaches to max_kv, or to
            the width of the table times the page size.

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
    given = cache_keywords(page_table, kv_lengths, cu_q, positions, batch_index, kv_start)
    if return_lse is not False:
        given["return_lse"] = return_lse
    for name, x in (("out", out), ("out_dtype", out_dtype)):
        if x is not None:
            given[name] = x
    return attention(q, k_pages, v_pages, **given, **options)


@takes(PagedOptions)
def attention_mla(
    q: Array,
    kv: Array,
    page_table: Any = None,
    kv_lengths: Array = None,
    *,
    dim_v: int = 512,
    cu_q: Array = None,
    batch_index: Array = None,
    kv_start: Array = None,
    return_lse: bool = False,
    out: Array = None,
    out_dtype: Any = None,
    **options: Unpack[PagedOptions],
) -> Any:
    """Attention whose values are the first `dim_v` numbers of the keys: latent attention, absorbed.

    One row of the cache is a key for all query heads, and its first numbers are the value: 512
    latent numbers and 64 that carry the position in DeepSeek-V2 (2024), section 2.1, where the
    up-projections of keys and values are absorbed into the query and the output. On a Hopper GPU a
    kernel of its own takes (576, 512) and reads each row once.

    Args:
        q: (batch, head, q_row, dim) in the order that `layout` names; with cu_q (total_q, head,
            dim). Absorbed queries beside their rotary part; dim is 576 for DeepSeek's models.
        kv: the cache: a pool of pages (page, kv_head, row, dim) as k_pages of `attention_paged`;
            without page_table (batch, kv_head, kv_row, dim). kv_head is 1 for DeepSeek's models.
            An array whose slices are views: NumPy's, PyTorch's, CuPy's.
        page_table: as in `attention_paged`; None without pages.
        kv_lengths: (batch,) keys of each request, those of this call's queries included; None
            without pages: all rows.
        dim_v: of the values.
        cu_q: as in `attention_paged`.
        batch_index: as in `attention_paged`.
        kv_start: as in `attention_paged`.
        return_lse: return (o, lse).
        out: as in `attention`.
        out_dtype: as in `attention`.
        **options: those of `attention`. scale is that of the unabsorbed heads, such as 192**-0.5:
            the default, dim**-0.5, is not what such models were trained with.

    Returns:
        o, of the shape of q with dim_v for dim; with return_lse (o, lse).

    Raises:
        fulmen.Error: as `attention_paged`.
        ShapeError: dim_v is not 1 to the dim of kv.
        UnsupportedError: a tensor that requires grad, beside a table of pages.

    >>> import numpy as np, fulmen
    >>> cache = np.eye(4, 6, dtype=np.float32).reshape(1, 1, 4, 6)  # 4 keys of 6 numbers
    >>> q = np.zeros((1, 2, 1, 6), np.float32)
    >>> fulmen.attention_mla(q, cache, dim_v=4)[0, 1]
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    dim = kv.shape[-1]
    if not 1 <= dim_v <= dim:
        raise ShapeError(f"dim_v is {dim_v}; rows of kv have {dim} numbers: allowed is 1 to {dim}")
    beside: dict[str, Any] = {"cu_q": cu_q, "batch_index": batch_index, "kv_start": kv_start}
    results: dict[str, Any] = {"return_lse": return_lse, "out": out, "out_dtype": out_dtype}
    v = kv[..., :dim_v]
    if page_table is not None or batch_index is not None or kv_start is not None:
        return attention_paged(q, kv, v, page_table, kv_lengths, **beside, **results, **options)
    if cu_q is not None:
        raise ArgumentError(
            "cu_q is given without page_table; packed queries need a table of pages"
        )
    given = {name: x for name, x in results.items() if x is not None and x is not False}
    if kv_lengths is not None:
        given["kv_lengths"] = kv_lengths
    return attention(q, kv, v, **given, **options)


def cache_keywords(
    page_table: Any,
    kv_lengths: Array,
    cu_q: Array,
    positions: Array,
    batch_index: Array,
    kv_start: Array,
) -> dict[str, Any]:
    """The keywords of `fulmen.attention` that the arguments of `attention_paged` stand for.

    Raises:
        ArgumentError: kv_lengths is missing, or there are two tables, or none for packed queries.
    """
    if kv_lengths is None:
        raise ArgumentError("kv_lengths is None; the keys of each request, (batch,), are needed")
    found = {"kv_lengths": kv_lengths, **table_keywords(page_table, batch_index)}
    if cu_q is not None and "page_table" not in found:
        raise ArgumentError(
            "cu_q is given without a table of pages; give page_table, or batch_index= for "
            "contiguous caches"
        )
    for name, x in (("cu_q", cu_q), ("positions", positions), ("kv_start", kv_start)):
        if x is not None:
            found[name] = x
    return found
