# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek-V2, 2024, section 2.1), dense and sparse, and when to absorb.

One row of the cache is a key for all query heads, and its first numbers are the value. Sparse: each
query row has a list of rows of the cache that an indexer chose for it (DeepSeek-V3.2, 2025), which
makes it a request of its own, with slots for a table of pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .array_types import Array, dtype_name, is_torch, torch_call
from .errors import ArgumentError, ShapeError
from .functional import attention
from .keywords import PagedOptions, takes
from .layouts import LAYOUTS
from .merging import merge
from .page_tables import (
    MOST_RECORD_VALUES,
    as_records,
    check_dim_v,
    is_records,
    latent_keywords,
)

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
    indices: Array = None,
    topk_lengths: Array = None,
    extra_kv: Array = None,
    extra_indices: Array = None,
    extra_topk_lengths: Array = None,
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
        q: (batch, head, q_row, dim) in the order that `layout` names; with cu_q, or with indices
            and layout "shd", (total_q, head, dim). Absorbed queries beside their rotary part; dim
            is 576 for DeepSeek's models.
        kv: the cache: a pool of pages (page, kv_head, row, dim) as k_pages of `attention_paged`;
            without page_table (batch, kv_head, kv_row, dim). kv_head is 1 for DeepSeek's models.
            An array whose slices are views: NumPy's, PyTorch's, CuPy's; for JAX's
            `fulmen.jax.attention_mla`, which makes no slice. Or records, as FlashMLA has them:
            bytes, of uint8, int8 or float8_e4m3fn, 656 in the place of dim = 576, or 584 in that
            of 512: `fulmen.append_kv` writes them.
        page_table: as in `attention_paged`; None without pages.
        kv_lengths: (batch,) keys of each request, those of this call's queries included; None
            without pages: all rows.
        dim_v: of the values.
        indices: (batch, q_row, topk), with rank 3 of q (total_q, topk); int32 or int64: sparse
            attention, decoding and prefill alike. The slots of the keys that each query row sees,
            page * page size + row of kv, in any order; -1: none. kv is a pool, or without pages the
            caches of all requests one behind the other. A row sees what is in its list and nothing
            else: page_table, kv_lengths, cu_q, batch_index and kv_start are left out, and so is
            causal, which is for the list to say.
        topk_lengths: (batch,) or (batch, q_row), with rank 3 (total_q,): how many entries of
            indices count; None: all of them.
        extra_kv: another cache, of any number of rows, beside indices: global tokens beside a
            window, say.
        extra_indices: the slots of each query row there, (batch, q_row, another topk).
        extra_topk_lengths: as topk_lengths, of extra_indices.
        cu_q: as in `attention_paged`.
        batch_index: as in `attention_paged`.
        kv_start: as in `attention_paged`.
        return_lse: return (o, lse).
        out: as in `attention`; None beside indices.
        out_dtype: as in `attention`.
        **options: those of `attention`. scale is that of the unabsorbed heads, such as 192**-0.5:
            the default, dim**-0.5, is not what such models were trained with.

    Returns:
        o, of the shape of q with dim_v for dim; with return_lse (o, lse).

    Raises:
        fulmen.Error: as `attention_paged`; ArgumentError on the CPU for a slot that kv does not
            have. On a GPU the row that has one is empty, and `fulmen.device_faults` tells.
        ShapeError: dim_v is not 1 to the dim of kv; indices are not those of q.
        UnsupportedError: a tensor that requires grad, beside a table of pages or records. Beside
            indices PyTorch's tensors have gradients, in q, the caches and the sinks: those of a
            cache's row are summed over the lists that name it, with deterministic=True in one
            order.

    >>> import numpy as np, fulmen
    >>> cache = np.eye(4, 6, dtype=np.float32).reshape(1, 1, 4, 6)  # 4 keys of 6 numbers
    >>> q = np.zeros((1, 2, 1, 6), np.float32)
    >>> fulmen.attention_mla(q, cache, dim_v=4)[0, 1]
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    >>> fulmen.attention_mla(q, cache, dim_v=4, indices=[[[3, -1, 0]]])[0, 1]
    array([[0.5, 0. , 0. , 0.5]], dtype=float32)
    """
    kv = as_records(kv, q.shape[-1])
    check_dim_v(kv.shape[-1] if not is_records(kv) else MOST_RECORD_VALUES, dim_v)
    beside: dict[str, Any] = {"cu_q": cu_q, "batch_index": batch_index, "kv_start": kv_start}
    results: dict[str, Any] = {"return_lse": return_lse, "out": out, "out_dtype": out_dtype}
    if indices is not None:
        _refuse(
            {"page_table": page_table, "kv_lengths": kv_lengths, **beside, "out": out},
            "indices, which say what each row sees",
        )
        lists = [_Chosen("", kv, indices, topk_lengths)]
        if extra_kv is not None or extra_indices is not None:
            other = None if extra_kv is None else as_records(extra_kv, q.shape[-1])
            lists.append(_Chosen("extra_", other, extra_indices, extra_topk_lengths))
        elif extra_topk_lengths is not None:
            raise ArgumentError("extra_topk_lengths is given without extra_indices; pass both")
        return _sparse(q, lists, dim_v, return_lse, out_dtype, dict(options))
    _refuse(
        {
            "topk_lengths": topk_lengths, "extra_kv": extra_kv, "extra_indices": extra_indices,
            "extra_topk_lengths": extra_topk_lengths,
        },
        "no indices; sparse attention needs them",
    )  # fmt: skip
    v = kv[..., :dim_v]
    given = {name: x for name, x in results.items() if x is not None and x is not False}
    given.update(latent_keywords(page_table, kv_lengths, cu_q, batch_index, kv_start))
    return attention(q, kv, v, **given, **options)


class _Chosen(NamedTuple):
    """A cache and the rows of it that each query row sees."""

    extra: str  # what the names of its arguments begin with
    kv: Array
    indices: Any
    lengths: Any

    def table(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Slots and their number by query row, (rows, topk) and (rows,); shape: (batch, q_row)."""
        name = f"{self.extra}indices"
        if self.kv is None or self.indices is None:
            missing = f"{self.extra}kv" if self.kv is None else name
            raise ArgumentError(f"{missing} is None; a second cache has extra_kv and extra_indices")
        indices = np.asarray(self.indices) if isinstance(self.indices, list) else self.indices
        if len(indices.shape) != len(shape) + 1 or tuple(indices.shape[:-1]) != shape:
            raise ShapeError(
                f"{name} has shape {tuple(indices.shape)}; a list for each row of q, "
                f"{(*shape, 'topk')}, is needed"
            )
        if indices.shape[-1] == 0:
            raise ShapeError(f"{name} has topk = 0; at least one entry is needed, -1 for none")
        table = indices.reshape(-1, indices.shape[-1])
        lengths = self.lengths
        if lengths is None:
            return table, table[:, 0] * 0 + table.shape[-1]
        lengths = np.asarray(lengths) if isinstance(lengths, list) else lengths
        if tuple(lengths.shape) == shape:
            return table, lengths.reshape(-1)
        if tuple(lengths.shape) == shape[:1]:
            return table, (lengths[:, None] + indices[..., 0] * 0).reshape(-1)
        raise ShapeError(
            f"{self.extra}topk_lengths has shape {tuple(lengths.shape)}; {shape[:1]} or {shape} "
            "is needed"
        )


def _refuse(given: dict[str, Any], beside: str) -> None:
    for name, x in given.items():
        if x is not None:
            raise ArgumentError(f"{name} is given beside {beside}: leave it out")


def _sparse(
    q: Array,
    lists: list[_Chosen],
    dim_v: int,
    return_lse: bool,
    out_dtype: Any,
    options: dict[str, Any],
) -> Any:
    """Each query row is a request with a table of slots; caches are merged by their lse."""
    for name in ("causal", "window", "mask", "bias", "alibi_slopes", "dropout_p", "q_lengths"):
        given = options.pop(name, None)
        if given is not None and given is not False and not (name == "dropout_p" and given == 0):
            raise ArgumentError(
                f"{name} is given beside indices; a row sees the slots of its list alone: leave "
                "what it may not see out of the list, or -1"
            )
    layout = LAYOUTS.get(options.pop("layout", "bhsd"))
    if layout is None or layout.rank < 3 or len(q.shape) != layout.rank:
        raise ShapeError(
            f"q has {len(q.shape)} axes; beside indices layout is 'bhsd' or 'bshd' with four, "
            "'hsd' or 'shd' with three"
        )
    by_row = q if layout.rows_before_heads else q.swapaxes(-2, -3)  # (.., q_row, head, dim)
    shape = tuple(by_row.shape[:-2])
    heads, dim = by_row.shape[-2:]
    requests = by_row.reshape(-1, 1, heads, dim)
    sinks = options.pop("sinks", None)
    is_recorded = is_torch(q) and torch_call("needs_gradients")(
        (q, sinks, *(chosen.kv for chosen in lists))
    )
    is_merged = len(lists) > 1 or (is_recorded and sinks is not None)
    own, wide = dtype_name(q.dtype), None
    if is_merged and own != "float64":  # rounded once, after the merge
        wide = "float32"
    options["out_dtype"] = wide if is_merged else out_dtype
    parts = []
    for chosen in lists:
        table, lengths = chosen.table(shape)
        pool = chosen.kv if layout.rows_before_heads else chosen.kv.swapaxes(1, 2)
        if is_recorded:
            attend = torch_call("attention_over_slots")
            parts.append(attend(requests, pool, table, lengths, dim_v, options))
            continue
        parts.append(
            attention(
                requests, pool, pool[..., :dim_v], page_table=table, kv_lengths=lengths, slots=True,
                layout="bshd", return_lse=True, sinks=None if is_merged else sinks, **options,
            )
        )  # fmt: skip
    o, lse = merge(parts, sinks=sinks, layout="bshd") if is_merged else parts[0]
    if wide is not None and (out_dtype is None or dtype_name(out_dtype) == own):
        o = o.astype(q.dtype) if hasattr(o, "astype") else o.to(q.dtype)
    o, lse = o.reshape(*shape, heads, dim_v), lse.reshape(*shape, heads).swapaxes(-1, -2)
    o = o if layout.rows_before_heads else o.swapaxes(-2, -3)
    return (o, lse) if return_lse else o


class MlaForm(NamedTuple):
    """What `mla_form` found: the cheaper form, and what each one takes."""

    form: str  # "absorbed" or "expanded"
    absorbed_flops: float
    expanded_flops: float
    absorbed_bytes: float
    expanded_bytes: float


def mla_form(
    q_rows: int,
    kv_rows: int,
    heads: int,
    *,
    latent: int = 512,
    rope: int = 64,
    nope: int = 128,
    dim_v: int = 128,
    causal: bool = True,
    flops_per_byte: float = 295.0,
) -> MlaForm:
    """Which form of latent attention is cheaper for one request: absorbed or expanded.

    A head's key is (W_k c, r), its value W_v c, where c is a row's latent and r its rotary part
    (DeepSeek-V2, 2024, section 2.1). Expanded, as in prefill, both are made for each row and head,
    and attention has dims nope + rope and dim_v. Absorbed, as in decoding, q becomes (W_k^T q, q_r)
    and o is W_v (P c): attention has dims latent + rope and latent, but all heads read one row. So
    absorbing saves 2 latent (nope + dim_v) operations a row of the cache and head, and pays 2 (2
    latent - nope - dim_v) more a pair, and its own projections a query row.

    Args:
        q_rows: new rows of the request, those whose attention is computed.
        kv_rows: rows of its cache, the new ones among them.
        heads: query heads on this device.
        latent: numbers of c.
        rope: numbers of r.
        nope: numbers of a head's key that do not rotate.
        dim_v: numbers of a head's value.
        causal: new rows see those up to themselves.
        flops_per_byte: what the device computes while it reads a byte: 989e12 / 3.35e12 on an H100.

    Returns:
        MlaForm: the form whose steps, each as long as the slower of its arithmetic and its memory
        in 16-bit numbers, take less time together; and operations and bytes of both.

    Raises:
        ArgumentError: a number is negative, or there are more new rows than rows.

    >>> import fulmen
    >>> fulmen.mla_form(1, 4096, 128).form, fulmen.mla_form(4096, 4096, 128).form
    ('absorbed', 'expanded')
    """
    sizes = {"q_rows": q_rows, "kv_rows": kv_rows, "heads": heads, "latent": latent, "rope": rope,
             "nope": nope, "dim_v": dim_v}  # fmt: skip
    for name, size in sizes.items():
        if size < 0:
            raise ArgumentError(f"{name} is {size}; allowed is 0 and more")
    if q_rows > kv_rows:
        raise ArgumentError(
            f"q_rows is {q_rows} and kv_rows {kv_rows}; new rows count among the rows of the cache"
        )
    pairs = q_rows * kv_rows - (q_rows * (q_rows - 1) / 2 if causal else 0)
    cache = kv_rows * (latent + rope)
    weights = heads * latent * (nope + dim_v)
    both = q_rows * heads * (nope + rope + dim_v)  # q and o as the layer has them
    absorbed_q = q_rows * heads * (2 * latent + rope)
    expanded_kv = kv_rows * heads * (nope + dim_v)
    # (operations, numbers moved) of each step
    absorbed = (
        (2.0 * q_rows * weights, weights + both + absorbed_q),
        (2.0 * pairs * heads * (2 * latent + rope), cache + absorbed_q),
    )
    expanded = (
        (2.0 * kv_rows * weights, weights + cache + expanded_kv),
        (2.0 * pairs * heads * (nope + rope + dim_v), expanded_kv + kv_rows * rope + both),
    )

    def time_of(steps: Any) -> float:
        return float(sum(max(flops / flops_per_byte, 2.0 * moved) for flops, moved in steps))

    is_absorbed = time_of(absorbed) <= time_of(expanded)
    return MlaForm(
        "absorbed" if is_absorbed else "expanded",
        *(float(sum(flops for flops, _ in steps)) for steps in (absorbed, expanded)),
        *(2.0 * sum(moved for _, moved in steps) for steps in (absorbed, expanded)),
    )
