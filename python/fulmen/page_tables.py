# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What stands for a table of pages in calls over caches: an array, (indptr, indices), an index; and
the arrays of a call that appends to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .array_types import Array, array_type_of, dtype_name
from .errors import ArgumentError, DTypeError, ShapeError, kind_of

RECORDS = {656: 576, 584: 512}  # caches of latent attention: bytes of a row, and its numbers
MOST_RECORD_VALUES = 512  # of them that may be values, the first ones


def as_records(cache: Array, dim: int) -> Array:
    """A cache whose rows are records of `dim` numbers as the library takes it: of uint8."""
    if RECORDS.get(cache.shape[-1]) != dim:
        return cache
    if dtype_name(cache.dtype) not in ("int8", "float8_e4m3fn"):
        return cache
    return cache.view(array_type_of(cache, "a cache").dtype_named("uint8"))


def is_records(cache: Array) -> bool:
    """Whether rows of a cache are records."""
    return dtype_name(cache.dtype) == "uint8"


# Of an append: those that may be numbers, those that are integers.
SCALES = ("k_scale", "v_scale")
INTEGERS = ("cu_new", "slots", "page_table", "page_indptr", "kv_lengths", "positions")


class AppendArrays(NamedTuple):
    """The arrays of `append_kv` in the order in which the library takes them."""

    k_pages: Array
    v_pages: Array
    q_out: Array
    k_new: Array
    v_new: Array
    cu_new: Array = None
    slots: Array = None
    page_table: Array = None
    page_indptr: Array = None
    kv_lengths: Array = None
    positions: Array = None
    cos: Array = None
    sin: Array = None
    q: Array = None
    k_scale: Array = None
    v_scale: Array = None


def check_dim_v(dim: int, dim_v: int) -> None:
    """Refuses values that are more than the `dim` numbers of a row."""
    if not 1 <= dim_v <= dim:
        raise ShapeError(f"dim_v is {dim_v}; rows of kv have {dim} numbers: allowed is 1 to {dim}")


def cache_keywords(
    page_table: Any,
    kv_lengths: Array,
    cu_q: Array,
    positions: Array,
    batch_index: Array,
    kv_start: Array,
    kv_shared: Array = None,
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
    if kv_shared is not None:
        is_number = isinstance(kv_shared, (int, np.integer))
        found["kv_shared"] = [int(kv_shared)] if is_number else kv_shared
    for name, x in (("cu_q", cu_q), ("positions", positions), ("kv_start", kv_start)):
        if x is not None:
            found[name] = x
    return found


def latent_keywords(
    page_table: Any, kv_lengths: Array, cu_q: Array, batch_index: Array, kv_start: Array
) -> dict[str, Any]:
    """As `cache_keywords`, of latent attention, whose cache may be without pages and lengths.

    Raises:
        ArgumentError: as there; or there are packed queries and no table.
    """
    if page_table is not None or batch_index is not None or kv_start is not None:
        return cache_keywords(page_table, kv_lengths, cu_q, None, batch_index, kv_start)
    if cu_q is not None:
        raise ArgumentError(
            "cu_q is given without page_table; packed queries need a table of pages"
        )
    return {} if kv_lengths is None else {"kv_lengths": kv_lengths}


def table_keywords(page_table: Any, batch_index: Array) -> dict[str, Any]:
    """page_table, and page_indptr beside it, from what stands for them; empty: there is no table.

    Raises:
        ArgumentError: there are two tables.
    """
    if page_table is None:
        return {} if batch_index is None else {"page_table": _column(batch_index)}
    if batch_index is not None:
        raise ArgumentError(
            "page_table and batch_index are both given; batch_index is for contiguous caches: "
            "leave one of them None"
        )
    if not isinstance(page_table, tuple):
        return {"page_table": page_table}
    if len(page_table) != 2:
        raise ArgumentError(
            f"page_table is a tuple of {len(page_table)}; (indptr, indices) has two, and a "
            "table of pages is an array or a list"
        )
    return dict(zip(("page_indptr", "page_table"), page_table))


def _column(batch_index: Any) -> Array:
    """A table with one page a request: its entry of a contiguous cache."""
    if isinstance(batch_index, (list, tuple)):
        batch_index = np.asarray(batch_index)
    if len(getattr(batch_index, "shape", ())) != 1:
        raise DTypeError(
            f"batch_index is {kind_of(batch_index)}; one integer a request, (batch,), is expected"
        )
    return batch_index[:, None]
