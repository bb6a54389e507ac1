# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Public bug reports, part 2: magnitudes and tails; strides, layouts, alignment; size limits.

See bugs_rows for how to read a row.
"""

from __future__ import annotations

from ..arrays import DTYPES
from ..case import Case

NUMERICS = [
    *(
        Case(f"u35_neg_shift_s{n}{suffix}", ("bug",), "pytorch#196678", heads=1, q_rows=n, dim=dim,
             inputs="opposed_100", dtype=dtype, masks=(("bool", "11qk", "everything"),))
        for n, dim, dtype, suffix in (  # D 128 and 32 once each
            (64, 64, "bfloat16", ""), (192, 64, "float16", ""), (320, 32, "bfloat16", ""),
            (704, 64, "bfloat16", ""), (704, 32, "float16", "_d32"), (192, 128, "bfloat16", "_d"),
        )
    ),
    *(
        Case(f"u37_backward_s{n}", ("bug",), "cudnn-frontend#160", heads=2, q_rows=n, dim=32,
             dtype="float16")
        for n in (1, 63, 65, 100, 127, 129, 191)
    ),
    Case("u38_one_key_133120", ("bug",), "pytorch#121558", heads=1, q_rows=1, dim=64,
         inputs="constant_133120", dtype="bfloat16", exact=True, finite_gradients=True),
    *(
        Case(f"u39_{kind}_s50_{dtype}", ("bug",), "pytorch#125674, #119320", q_rows=50, dim=64,
             inputs=kind, dtype=dtype)
        for kind in ("constant_1000", "constant_8192")
        for dtype in ("float32", "float64", "bfloat16")
    ),
    *(
        Case(f"u40_cap_50_of_huge_scores_{dtype}", ("bug",), "vllm#56578", q_rows=9, kv_rows=12,
             softcap=50.0, inputs="huge", dtype=dtype)
        for dtype in DTYPES
    ),
    Case("u42_heavy_tails_gqa8_d256", ("bug",), "TransformerEngine#3216", batch=2, heads=16,
         kv_heads=2, q_rows=40, dim=256, causal=True, inputs="outlier", dtype="bfloat16"),
    Case("u43_uneven_do", ("bug",), "flash-attention#2372", batch=2, heads=4, q_rows=30, dim=32,
         inputs="per_head_do", dtype="bfloat16"),
    Case("u43_uneven_do_rows", ("bug",), "flash-attention#2372", batch=2, heads=4, q_rows=30,
         dim=32, inputs="uneven_do", dtype="float16"),
    *(
        Case(f"u45_merge_{count}_chunks", ("bug",), "ring-flash-attention#42", heads=2, q_rows=16,
             kv_rows=64, dim=32, dtype="bfloat16", out_dtype="float32", gradients=(),
             check="merge", parts=(64 // count,) * count)
        for count in (2, 4, 8, 32)
    ),
    Case("u46_random_mask_580_of_1000", ("bug",), "pytorch#163588", heads=1, q_rows=30,
         kv_rows=1000, dim=64, masks=(("bool", "11qk", 0.58),), dtype="bfloat16"),
    Case("u46_float32_is_float32", ("bug",), "pytorch#138556", heads=2, q_rows=60, dim=64),
]  # fmt: skip

CAPS = [  # among the results of bugs_masks
    Case("u103_cap_before_bias_and_slopes", ("bug",), "TransformerEngine#3391", q_rows=20,
         kv_rows=26, softcap=2.0, bias="1hqk", alibi="h", inputs="wide", dtype="bfloat16"),
    Case("u104_cap_is_not_ignored", ("bug",), "sglang#33915", q_rows=20, inputs="wide",
         check="differs", others=({"softcap": 5.0}, {"softcap": 50.0})),
]  # fmt: skip

MEMORY = [
    Case("u47_do_transposed", ("bug",), "flash-attention#355", batch=2, q_rows=20, dim=32,
         views=(("do", "rows_first"),), dtype="float16"),
    Case("u47_do_expanded", ("bug",), "flash-attention#355", batch=2, q_rows=20, dim=32,
         views=(("do", "same_scalar"),), dtype="float16"),
    Case("u48_expanded_keys_and_bias", ("bug",), "pytorch#112577", batch=2, heads=6, q_rows=9,
         kv_rows=13, views=(("q", "rows_first"), ("k v", "same_heads")), bias="b11k"),
    *(
        Case(f"u49_same_heads_k{n}", ("bug",), "pytorch#191937", heads=3, q_rows=5, kv_rows=n,
             dim=512, views=(("k v", "same_heads"),), masks=(("bool", "11qk", 0.8),),
             dtype="bfloat16")
        for n in (1, 31, 32, 33, 64, 65, 97, 129)
    ),
    *(
        Case(f"u51_offset_{n}", ("bug",), "pytorch#183484", batch=2, heads=4, q_rows=64, dim=64,
             views=(("q k v do", f"offset_{n}"),))
        for n in (1, 2, 3)
    ),
    Case("u52_do_like_out_s49", ("bug",), "pytorch#133671", batch=2, q_rows=49, dim=32,
         views=(("q k v do", "rows_first"),), out="rows_first"),
    Case("u53_do_strides_differ_from_o", ("bug",), "pytorch#176915, #134001", batch=2, q_rows=17,
         dim=24, views=(("do", "dims_first"),)),
    Case("u55_same_batch", ("bug",), "pytorch#175764", batch=3, q_rows=10, dim=16,
         views=(("q k v", "same_batch"),)),
    Case("u55_same_heads", ("bug",), "pytorch#175764", batch=3, q_rows=10, dim=16,
         views=(("q k v", "same_heads"),), out="dims_first"),
    Case("u57_gqa_decode", ("bug",), "pytorch#174861", heads=32, kv_heads=2, q_rows=1,
         kv_rows=1024, dim=128, dtype="bfloat16", check="same", others=({},), gradients=()),
    Case("u58_dim_v_smaller", ("bug",), "pytorch#176767", q_rows=20, dim=64, dim_v=24),
    Case("u58_dim_v_larger", ("bug",), "pytorch#176767", q_rows=20, dim=24, dim_v=64),
    *(
        Case(f"u59_bias_row_of_{n}", ("bug",), "xformers#684, #808, #813, #1263", heads=2,
             q_rows=min(n, 60), kv_rows=n, dim=8, bias="1hqk", dtype=dtype)
        for n, dtype in ((43, "float32"), (77, "float16"), (498, "float32"))
    ),
    Case("u60_as_many_heads_as_rows", ("bug",), "diffusers#14341", batch=2, heads=16, q_rows=16,
         dim=64, views=(("k v", "rows_first"),), dtype="bfloat16"),
    Case("u60_other_heads_than_rows", ("bug",), "diffusers#14341", batch=2, heads=4, q_rows=16,
         dim=64, views=(("k v", "rows_first"),), dtype="bfloat16"),
]  # fmt: skip

SIZES = [
    Case("u62_batch_8300_one_row", ("bug",), "flash-attention#2260, #1500", heads=16, q_rows=1,
         dim=16, dtype="bfloat16", check="repeat", repeat=8300),
    Case("u65_do_rows_2_to_the_30_apart", ("bug",), "flash-attention#2611", heads=1, q_rows=4,
         kv_rows=5, dim=8, views=(("do", "far_rows"),), dtype="bfloat16"),
    Case("u65_everything_2_to_the_30_apart", ("bug",), "flash-attention#2611", heads=1, q_rows=4,
         kv_rows=4, dim=8, views=(("q k v do", "far_rows"),), dtype="float16"),
    Case("u65_packed_do_far_rows", ("bug",), "flash-attention#2611", heads=1, dim=8,
         q_packed=(2, 2), kv_packed=(3, 2), views=(("do", "far_rows"),), dtype="bfloat16"),
    Case("u66_batches_2_to_the_30_apart", ("bug",), "flash-attention#772", batch=4, heads=2,
         q_rows=3, kv_rows=9, dim=8, views=(("k v", "far_batch"),), dtype="float16"),
    Case("u67_batch_of_many_or_alone", ("bug",), "flash-attention#47", batch=8, heads=2, q_rows=20,
         kv_rows=150, dim=16, dtype="bfloat16", check="alone"),
    Case("u72_batch_65536", ("bug",), "pytorch#146704", heads=1, q_rows=4, dim=8, dtype="float16",
         check="repeat", repeat=65536),
    Case("u72_batch_100000", ("bug",), "pytorch#142228, xformers#845", heads=1, q_rows=1,
         kv_rows=3, dim=4, check="repeat", repeat=100000),
]  # fmt: skip

CASES = NUMERICS + MEMORY + SIZES
