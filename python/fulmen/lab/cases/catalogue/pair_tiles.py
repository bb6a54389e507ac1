# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Biases and boolean masks over pairs that kernels read in whole tiles: every dtype, each axis that
may be broadcast, ends inside a tile, bounds of intervals, and rows of which nothing is left."""

from __future__ import annotations

from typing import Any

from ..case import Case

TAGS = ("pair_tiles",)
MASK = (("bool", "1hqk", 0.7),)


def tiles_case(name: str, **more: Any) -> Case:
    """One case; rows of 16 bytes, so that a copy engine can read them."""
    sizes: dict[str, Any] = {"heads": 2, "q_rows": 144, "dim": 64, "dtype": "bfloat16"}
    return Case(f"pair_tiles_{name}", TAGS, "", fixed=("bias",), **(sizes | more))


CASES = [
    *(
        tiles_case(f"bias_{bias}_{dtype}_d{dim}", bias=f"1hqk {bias}", dtype=dtype, dim=dim)
        for bias in ("same", "float32")
        for dtype in ("bfloat16", "float16")
        for dim in (64, 128)
    ),
    *(tiles_case(f"mask_d{dim}", masks=MASK, dim=dim) for dim in (32, 64, 128, 192, 256)),
    tiles_case("bias_d192", bias="1hqk float32", dim=192),
    tiles_case("bias_d256", bias="1hqk same", dim=256),
    tiles_case("bias_d512", bias="1hqk same", dim=512, q_rows=80),
    *(
        tiles_case(f"bias_{axes}", bias=f"{axes} {dtype}", batch=2, q_rows=80)
        for axes, dtype in (("bhqk", "same"), ("b1qk", "float32"), ("11qk", "same"))
    ),
    *(
        tiles_case(f"mask_{axes}", masks=(("bool", axes, 0.6),), batch=2, q_rows=80)
        for axes in ("bhqk", "b1qk", "11qk")
    ),
    tiles_case("both", masks=MASK, bias="1hqk float32", dim=128),
    tiles_case("both_causal", masks=MASK, bias="1hqk same", causal=True, q_rows=208),
    tiles_case("bias_window", bias="1hqk float32", causal=True, window=(40, 0), q_rows=240),
    tiles_case("mask_window", masks=MASK, causal=True, window=(40, 0), q_rows=240, dim=128),
    tiles_case("grouped", masks=MASK, bias="1hqk same", heads=4, kv_heads=2, dim=128),
    tiles_case("longer_keys", masks=MASK, bias="1hqk same", q_rows=72, kv_rows=272),
    tiles_case("fewer_keys", masks=MASK, bias="1hqk same", q_rows=200, kv_rows=48),
    tiles_case("lengths", masks=MASK, bias="1hqk float32", batch=3, q_lengths=(144, 65, 7),
               kv_lengths=(144, 64, 70)),
    tiles_case("hides", bias="1hqk same hides"),
    tiles_case("hides_float32", bias="1hqk float32 hides", dim=128),
    tiles_case("lowest_row", bias="1hqk float32 lowest"),
    tiles_case("slopes", bias="1hqk same", masks=MASK, alibi="h"),
    tiles_case("dropout", bias="1hqk same", masks=MASK, dropout_p=0.2, rng=(5, 7)),
    tiles_case("negative_scale", bias="1hqk same", masks=MASK, scale=-0.2),
    tiles_case("expression", bias="1hqk same", masks=MASK, expression="relative"),
]  # fmt: skip
