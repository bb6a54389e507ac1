# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The parameter grids of FlashAttention's public tests, as cases of ours.

What each of its three generations varies in test_flash_attn_output, and the first two in their
tests of packed sequences, dropout and caches, without what chooses a kernel there and nothing here
(num_splits, pack_gqa) and what README.md here lists as refused.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One forward and backward pass; 6 query heads."""

    rows: tuple[int, int]
    dims: tuple[int, int]
    kv_heads: int
    causal: bool
    softcap: float
    window: tuple[int, int] | None = None
    chunk: int = 0
    alibi: bool = False
    sinks: bool = False
    deterministic: bool = False
    dropout: float = 0.0
    form: str = ""  # packed tensors: "kv", "qkv"
    new: bool = False  # keys that are appended to a cache
    entries: bool = False  # a cache with more entries than the batch
    page: int = 0  # rows of a page
    padded: bool = False  # caches begin behind some rows
    rotary: float = 0.0  # share of the dimension that is rotated
    interleaved: bool = False

    def __str__(self) -> str:
        return ",".join(f"{name}={x}" for name, x in self._asdict().items() if x)


KV_HEADS = [6, 3, 1]
FLAGS = [False, True]
SOFTCAPS = [0.0, 15.0]
FA2_ROWS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
            (1023, 1024), (1024, 1023), (256, 128), (1, 147), (3, 1), (33, 33)]  # fmt: skip
FA2_DIMS = [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256]
VARLEN_ROWS = [(1, 1), (1, 3), (2, 1), (1, 147), (3, 513), (64, 128), (113, 203), (128, 217),
               (113, 211), (108, 256), (256, 512), (307, 256), (640, 128),
               (1023, 1024)]  # fmt: skip
CACHE_ROWS = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (128, 128)]
FA3_ROWS = [(64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128),
            (128, 217), (113, 211), (108, 256), (384, 256), (640, 128), (512, 256), (1024, 1024),
            (1023, 1024), (1024, 1023)]  # fmt: skip
FA3_DIMS = [(64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
FA4_ROWS = [(1, 1), (3, 3), (64, 32), *FA3_ROWS, (256, 512)]
FA4_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


def fa2() -> Iterator[Case]:
    for rows, dim, heads, causal, local, alibi, softcap in itertools.product(
        FA2_ROWS, FA2_DIMS, KV_HEADS, FLAGS, FLAGS, FLAGS, SOFTCAPS
    ):
        window = (17, 5) if local else None
        yield Case(rows, (dim, dim), heads, causal, softcap, window, alibi=alibi)


def fa2_varlen() -> Iterator[Case]:
    for rows, dim, heads, causal, local, alibi, softcap, form in itertools.product(
        VARLEN_ROWS, [80, *FA2_DIMS], KV_HEADS, FLAGS, FLAGS, FLAGS, SOFTCAPS, ("", "kv")
    ):
        window = (23, 4) if local else None
        yield Case(rows, (dim, dim), heads, causal, softcap, window, alibi=alibi, form=form)


def fa2_qkvpacked() -> Iterator[Case]:
    for rows, dim, causal, local, alibi in itertools.product(
        (97, 128, 200, 384, 768, 1024, 1025), FA2_DIMS, FLAGS, FLAGS, FLAGS
    ):
        window = (29, 8) if local else None
        yield Case((rows, rows), (dim, dim), 6, causal, 0.0, window, alibi=alibi, form="qkv")


def fa2_dropout() -> Iterator[Case]:
    for case in fa2():
        if not case.softcap:
            yield case._replace(dropout=0.17)


def caches() -> Iterator[Case]:
    for rows, dim, heads, causal, local, alibi, new, entries in itertools.product(
        CACHE_ROWS, [32, 59, 64, 80, 128, 256], KV_HEADS, FLAGS, FLAGS, FLAGS, FLAGS, FLAGS
    ):
        window = (19, 6) if local else None
        yield Case(
            rows, (dim, dim), heads, causal, 0.0, window, alibi=alibi, new=new, entries=entries
        )


def paged_caches() -> Iterator[Case]:
    for rows, dim, heads, limit, new, page, rotary, padded in itertools.product(
        CACHE_ROWS, [32, 59, 64, 128], KV_HEADS, ("no", "causal", "window", "chunk"),
        FLAGS, (0, 1, 4, 128), (0.0, 0.5, 1.0), FLAGS,
    ):  # fmt: skip
        if rotary and not new:
            continue
        yield Case(
            rows, (dim, dim), heads, limit == "causal", 0.0, (19, 6) if limit == "window" else None,
            45 if limit == "chunk" else 0, new=new, page=page, rotary=rotary, padded=padded,
            interleaved=dim == 64,
        )  # fmt: skip


def fa3_varlen() -> Iterator[Case]:
    for rows, dims, heads, causal, limit, softcap in itertools.product(
        VARLEN_ROWS, FA3_DIMS, KV_HEADS, FLAGS, ("no", "window", "chunk"), SOFTCAPS
    ):
        window, chunk = (37, 3) if limit == "window" else None, 45 if limit == "chunk" else 0
        yield Case(rows, dims, heads, causal, softcap, window, chunk)


def fa3() -> Iterator[Case]:
    for rows, dims, heads, causal, limit, softcap in itertools.product(
        FA3_ROWS, FA3_DIMS, KV_HEADS, FLAGS, ("no", "window", "chunk"), SOFTCAPS
    ):
        window, chunk = (40, 9) if limit == "window" else None, 50 if limit == "chunk" else 0
        yield Case(rows, dims, heads, causal, softcap, window, chunk)


def fa4() -> Iterator[Case]:
    for rows, dims, heads, causal, local, softcap, sinks, deterministic in itertools.product(
        FA4_ROWS, FA4_DIMS, KV_HEADS, FLAGS, FLAGS, SOFTCAPS, FLAGS, FLAGS
    ):
        window = (31, 12) if local else None
        yield Case(
            rows, dims, heads, causal, softcap, window, sinks=sinks, deterministic=deterministic
        )


def drawn(grid: list[Any], number: int) -> list[Any]:
    """The same `number` cases every time."""
    return random.Random(1).sample(grid, number)
