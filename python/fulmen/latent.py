# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a cache of latents, in its absorbed form.

One row of the cache is a key for all query heads, and its first numbers are the value: 512 latent
numbers and 64 that carry the position in DeepSeek-V2 (2024), section 2.1, where the up-projections
of keys and values are absorbed into the query and the output. The call is `fulmen.attention` or
`fulmen.attention_paged` with v a view of k. On a Hopper GPU a kernel of its own takes (576, 512) and
reads each row once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .array_types import Array
from .caches import attention_paged
from .errors import ArgumentError, ShapeError
from .functional import attention
from .keywords import PagedOptions, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    """Attention whose values are the first `dim_v` numbers of the keys.

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
