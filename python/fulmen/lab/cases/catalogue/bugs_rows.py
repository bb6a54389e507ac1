# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Public bug reports, part 1: empty rows, masked tails, what lies in padding; zero sizes, packed.

Each name starts with the number under which docs and issues know the report; `note` names the
report. Shapes are those of the report where a plain computation of them is quick, else smaller in
the axes that do not matter.
"""

from __future__ import annotations

from ..case import Case

EMPTY_ROWS = [
    Case("u01_zero_rows_of_a_bool_mask", ("bug",), "pytorch#103963", heads=1, q_rows=8, dim=8,
         masks=(("bool", "11qk", "top_left_half"),), need_each=True),
    Case("u02_last_row_masked", ("bug",), "pytorch#103749", heads=2, q_rows=6, kv_rows=10, dim=8,
         scale=0.125, masks=(("bool", "11qk", "last_row_empty"),)),
    Case("u03_lowest_float_is_finite", ("bug",), "pytorch#110213", heads=1, q_rows=3, dim=4,
         bias="11qk float32 lowest"),
    Case("u03_lowest_float_is_finite_bf16", ("bug",), "pytorch#110213", heads=1, q_rows=3, dim=4,
         bias="11qk float32 lowest", dtype="bfloat16"),
    Case("u04_lowest_float_left", ("bug",), "pytorch#109517", heads=1, q_rows=441, dim=64,
         bias="11qk float32 lowest_left"),
    Case("u06_padding_and_band", ("bug",), "pytorch#41508", batch=2, heads=1, q_rows=4, dim=1,
         masks=(("bool", "b1qk", "padded_band"),), need_each=True),
    Case("u07_nan_in_a_masked_key", ("bug",), "pytorch#101967", heads=1, q_rows=2, dim=4,
         masks=(("bool", "11qk", "last_key_hidden"),), poison="nan_hidden"),
    Case("u07_nan_by_length", ("bug",), "pytorch#101967", heads=1, q_rows=2, dim=4,
         kv_lengths=(1,), poison="nan_hidden"),
    Case("u08_nan_past_the_lengths", ("bug",), "flash-attention#1745", batch=2, heads=1, q_rows=1,
         kv_rows=3, dim=64, kv_lengths=(1, 3), dtype="float16", poison="nan_hidden"),
    Case("u10_more_queries_than_keys", ("bug",), "flashinfer#4452", q_rows=40, kv_rows=9,
         causal=True, dtype="bfloat16"),
    Case("u11_every_score_below_minus_5e4", ("bug",), "flashinfer#4267, #4450", q_rows=4,
         kv_rows=50, dim=128, inputs="opposed_2e5", dtype="bfloat16"),
    Case("u11_every_score_below_minus_5e4_f32", ("bug",), "flashinfer#4267, #4450", q_rows=4,
         kv_rows=50, dim=128, inputs="opposed_2e5"),
    Case("u12_no_finite_mask_value", ("bug",), "lattice#361", heads=1, q_rows=2, dim=1, scale=1.0,
         inputs="constant_1000", masks=(("bool", "11qk", "last_key_hidden"),)),
    Case("u14_one_key_causal_packed", ("bug",), "flash-attention#443", heads=1, dim=32,
         q_packed=(76, 34, 146), kv_packed=(1, 1, 1), causal=True, inputs="ones_do",
         dtype="float16", max_rows=55, exact=True),
    Case("u15_one_key", ("bug",), "flash-attention#334", heads=1, q_rows=1, dim=16,
         inputs="ones_do", dtype="float16", exact=True),
    Case("u16_causal_s1024", ("bug",), "flash-attention#1052", heads=1, q_rows=1024, dim=128,
         inputs="wide", causal=True, dtype="float16"),
    Case("u18_distance_bias_s1025", ("bug",), "pytorch#153799", heads=1, q_rows=1025, dim=64,
         causal=True, bias="11qk same distance", dtype="bfloat16"),
    Case("u19_no_dim", ("bug",), "pytorch#184330", heads=16, q_rows=16, dim=0, dim_v=1),
    Case("u20_all_q_nan", ("bug",), "pytorch#141128", batch=2, heads=4, q_rows=16, dim=8,
         poison="nan_all_q"),
    Case("u21_outputs_full_of_nan", ("bug",), "xformers#1025", heads=12, dim=64,
         q_packed=(64, 60), kv_packed=(64, 60), dtype="bfloat16", out="contiguous"),
    Case("u21_guarded_outputs", ("bug",), "xformers#1025", heads=3, dim=64,
         q_packed=(64, 60), kv_packed=(64, 60), dtype="bfloat16", out="guarded"),
]  # fmt: skip

SIZES = [
    Case("u23_no_query", ("bug",), "pytorch#141219", batch=7, heads=9, q_rows=0, dim=7,
         kv_rows=0, causal=True, dtype="float16"),
    Case("u23_no_batch_no_rows", ("bug",), "pytorch#141218", batch=0, q_rows=2, dim=0, dim_v=1),
    Case("u23_heads_9_over_7", ("bug",), "pytorch#174939", batch=7, heads=9, kv_heads=7, q_rows=0,
         dim=7, dtype="float16", check="refused", gradients=()),
    Case("u24_no_keys", ("bug",), "flash-attention#2470", q_rows=6, kv_rows=0, need_each=True),
    Case("u24_no_keys_causal", ("bug",), "flash-attention#2470", q_rows=6, kv_rows=0, causal=True),
    Case("u25_keys_without_queries", ("bug",), "flash-attention#2562", heads=4, kv_heads=1, dim=64,
         q_packed=(0, 151, 105, 0), kv_packed=(317, 218, 105, 384), dtype="bfloat16"),
    Case("u27_total_below_batch", ("bug",), "flash-attention#1619", heads=21, kv_heads=7, dim=120,
         q_packed=(0, 0, 0, 1), kv_packed=(0, 0, 0, 1), dtype="bfloat16", exact=True),
    Case("u28_entry_without_queries", ("bug",), "flash-attention#2421", q_packed=(9, 0, 5),
         kv_packed=(7, 12, 5), dtype="bfloat16"),
    Case("u29_entries_without_keys", ("bug",), "flash-attention#1155", q_packed=(9, 4, 5),
         kv_packed=(7, 0, 5), views=(("q k v do", "gapped"),), out="guarded"),
    Case("u30_tail_rows", ("bug",), "flash-attention#1661", q_packed=(9, 4), kv_packed=(7, 6),
         q_tail=50, kv_tail=41, out="contiguous", poison="nan_hidden"),
    Case("u34_all_entries_empty", ("bug",), "flash-attention#2568", q_packed=(0, 0, 0),
         kv_packed=(0, 0, 0), q_tail=3, kv_tail=2),
    Case("u34_first_and_last_empty", ("bug",), "flash-attention#2568", q_packed=(0, 7, 0),
         kv_packed=(0, 9, 0), causal=True),
    Case("u34_alternate_empty", ("bug",), "flash-attention#2568", q_packed=(3, 0, 4, 0, 5),
         kv_packed=(0, 6, 0, 7, 5)),
]  # fmt: skip

CASES = EMPTY_ROWS + SIZES
