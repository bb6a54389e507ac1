# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Public bug reports, part 3: masks, windows, groups; lse, merge, gradients of a bias, same bits.

See bugs_rows for how to read a row.
"""

from __future__ import annotations

from ..case import Case
from .bugs_numbers import CAPS

MASKS = [
    *(
        Case(f"u74_causal_{q}x{k}_{alignment}", ("bug",), "pytorch#108108, #110144, #115111",
             q_rows=q, kv_rows=k, causal=True, alignment=alignment)
        for q, k in ((2, 5), (5, 2))
        for alignment in ("bottom_right", "top_left")
    ),
    *(
        Case(f"u75_window_of_{w}_keys", ("bug",), "transformers#39408, #29623; vllm#3385",
             q_rows=30, window=(w - 1, 0), causal=True, dtype="bfloat16")
        for w in (1, 2, 7, 29, 30, 31)
    ),
    Case("u76_encodings_of_causal", ("bug",), "TransformerEngine#3528", batch=2, heads=4,
         q_rows=90, dim=32, causal=True, dtype="bfloat16", check="same",
         others=({"window": (-1, 0)}, {"window": (None, 0)}, {"window": (-1, -1)},
                 {"causal": None, "window": (-1, 0)})),
    Case("u76_encodings_of_a_window", ("bug",), "TransformerEngine#3528", q_rows=70, window=9,
         causal=True, dtype="float32", check="same",
         others=({"window": (9, 0)}, {"causal": None, "window": (9, 0)})),
    *(
        Case(f"u77_gqa{ratio}_causal", ("bug",), "flash-attention#2528", heads=ratio, kv_heads=1,
             q_rows=70, kv_rows=70, causal=True, dtype="bfloat16", dim=8)
        for ratio in (2, 3, 4, 6, 7, 8, 12, 16)
    ),
    Case("u78_window_and_first_keys", ("bug",), "flash-attention#2563", heads=8, kv_heads=2,
         q_rows=80, dim=32, causal=True, masks=(("bool", "11qk", "sink_and_window"),),
         dtype="bfloat16"),
    Case("u84_mask_too_narrow", ("bug",), "flashinfer#3176", q_rows=10, kv_rows=20,
         masks=(("bool", "11qn", 0.5),), check="refused", gradients=()),
    Case("u84_mask_transposed", ("bug",), "flashinfer#5271", q_rows=10, kv_rows=20,
         masks=(("bool", "11kq", 0.5),), check="refused", gradients=()),
    Case("u85_mask_and_causal", ("bug",), "flashinfer#1489", q_rows=12, kv_rows=20, causal=True,
         masks=(("bool", "11qk", 0.5),)),
    Case("u88_heads_33_over_2", ("bug",), "flash-linear-attention#1029", heads=33, kv_heads=2,
         check="refused", gradients=()),
    Case("u88_heads_3_over_2", ("bug",), "flash-linear-attention#1029", heads=3, kv_heads=2,
         check="refused", gradients=()),
    *(
        Case(f"u89_{n}_kv_heads", ("bug",), "pytorch#193893", heads=8 if 8 % n == 0 else n,
             kv_heads=n, q_rows=1 + 8 * (n % 2), kv_rows=33, dtype="bfloat16")
        for n in range(1, 9)
    ),
]  # fmt: skip

RESULTS = [
    Case("u90_lse_is_natural", ("bug",), "pytorch#181645", q_rows=9, kv_rows=40, dtype="bfloat16",
         gradients=()),
    Case("u91_merge_3072_and_64", ("bug",), "sglang#40903, vllm#52796, #28840", heads=1, q_rows=4,
         kv_rows=3136, dim=16, dtype="bfloat16", check="merge", parts=(3072, 64), gradients=()),
    *(
        Case(f"u92_merge_with_{name}", ("bug",), "vllm#27491, #28181; flash-attention#978",
             q_rows=4, kv_rows=32, check="merge", parts=parts, gradients=(), masks=masks)
        for name, parts, masks in (
            ("an_empty_part", (0, 32), ()),
            ("a_hidden_part", (16, 16), (("bool", "11qk", "top_left_half"),)),
            ("nothing", (0, 16, 16), (("bool", "11qk", "nothing"),)),
        )
    ),
    Case("u93_rows_without_keys", ("bug",), "vllm#49294", batch=3, q_rows=4, kv_rows=20,
         kv_lengths=(0, 20, 3), dtype="bfloat16"),
    Case("u94_lse_without_gradients", ("bug",), "attention-gym#37", batch=2, heads=4, q_rows=128,
         dim=64, dtype="bfloat16", gradients=()),
    Case("u95_gradient_through_lse", ("bug",), "pytorch#136232", heads=4, q_rows=37, dim=64,
         dlse=True, need_each=True),
    Case("u95_gradient_through_lse_f64", ("bug",), "pytorch#136232", heads=4, q_rows=37, dim=64,
         dlse=True, dtype="float64", causal=True),
    *CAPS,
    Case("u105_only_the_bias", ("bug",), "pytorch#148476", batch=2, q_rows=10, kv_rows=12,
         bias="11qk", gradients=("bias",)),
    *(
        Case(f"u106_bias_{letters}", ("bug",), "jax#30593, #27184, #23701", batch=3, q_rows=7,
             kv_rows=9, bias=letters, dtype="bfloat16", need_each=True)
        for letters in ("bhqk", "b11k", "bh11", "1hqk", "b1q1", "1111")
    ),
    Case("u107_mask_of_keys", ("bug",), "jax#28974", batch=3, q_rows=7, kv_rows=9,
         masks=(("bool", "b11k", 0.6),), dtype="bfloat16"),
    *(
        Case(f"u110_bias_and_its_gradient_{dtype}", ("bug",), "pytorch#174018", q_rows=9,
             bias=f"1hqk {dtype}", dtype="bfloat16")
        for dtype in ("bfloat16", "float32")
    ),
    Case("u111_deterministic", ("bug",), "flash-attention#2244", heads=4, kv_heads=2, q_rows=100,
         dim=128, causal=True, dtype="bfloat16", check="same",
         others=({"deterministic": True},) * 5),
    Case("u113_row_alone_or_in_a_batch", ("bug",), "FlashMLA#212, flashinfer#2424", batch=5,
         heads=4, kv_heads=2, q_rows=3, kv_rows=100, dim=32, causal=True, dtype="bfloat16",
         kv_lengths=(100, 3, 64, 65, 17), check="alone"),
]  # fmt: skip

CASES = MASKS + RESULTS
