# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's dense decoding (module flash_mla), with its arguments and returns.

Any number of heads and of new rows, pages of any size, 16-bit numbers. get_mla_metadata() has
nothing to compute: lengths are read where the call runs, and results do not depend on what it
returns. Refused by name: sparse indices and caches of 8-bit records.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..caches import attention_mla
from ..errors import UnsupportedError

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """FlashMLA's tile_scheduler_metadata and num_splits, which nothing here needs."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    **sparse: Any,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's call: (o, lse).

    Args:
        q: (batch, q_row, head, dim).
        k_cache: (page, row, kv_head, dim): the pool of pages.
        block_table: (batch, page) int32.
        cache_seqlens: (batch,) int32.
        head_dim_v: of the values, the first numbers of the keys.
        tile_scheduler_metadata: not read.
        num_splits: not read.
        softmax_scale: None: dim**-0.5.
        causal: new row i sees keys up to its own.
        is_fp8_kvcache: refused.
        indices: refused.
        **sparse: further arguments of sparse calls: refused, unless None.

    Returns:
        o (batch, q_row, head, head_dim_v) and lse (batch, head, q_row), natural logarithms.

    Raises:
        UnsupportedError: a sparse call, or a cache of 8-bit records.
        fulmen.Error: as `fulmen.attention_mla`.
    """
    del tile_scheduler_metadata, num_splits
    if is_fp8_kvcache:
        raise UnsupportedError(
            "is_fp8_kvcache is True; fulmen.compat.flash_mla reads caches of 16-bit numbers"
        )
    for name, value in {"indices": indices, **sparse}.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} is given; fulmen.compat.flash_mla takes dense calls, with block_table"
            )
    found: tuple[Tensor, Tensor] = attention_mla(
        q, k_cache, block_table, cache_seqlens, dim_v=head_dim_v, scale=softmax_scale,
        causal=causal, layout="bshd", return_lse=True,
    )  # fmt: skip
    return found
