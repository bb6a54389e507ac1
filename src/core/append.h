// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_append_kv and fulmen_rotary as every backend takes them: arrays in normal form, and sizes.
// A rotary embedding alone is an append without caches. Where a row goes is said once, in
// kernels/attention/append_row.cuh.
#pragma once

#include "core/tensor.h"
#include "kernels/attention/append_row.cuh"
#include "kernels/attention/mla_record.cuh"

namespace fulmen {

struct AppendProblem : AppendArrays<Tensor> {
  bool interleaved = false;

  DType dtype = DType::kNone;  // of k, v and q; of the caches too, unless they are quantised
  AppendExtents extents;
  i64 batch = 0;  // of k, v and q
  i64 kv_heads = 0;
  i64 heads = 0;  // of q
  i64 dim_qk = 0;
  i64 dim_v = 0;

  bool has_caches() const { return k_cache.present(); }
  bool rotates() const { return cos.present(); }
  bool quantises() const { return is_quantised(k_cache.dtype); }
  bool has_records() const { return is_record(k_cache.dtype); }
  i64 rotary_dim() const { return rotates() ? 2 * cos.shape[3] : 0; }
  // The first element that rotates.
  i64 rotary_begin() const { return has_records() ? dim_qk - rotary_dim() : 0; }
};

// Each array of an append, with its name in fulmen.h.
template <class Array>
struct AppendArrayOf {
  const char* name;
  Array AppendArrays<Array>::* member;
  bool is_written;
};
template <class Array>
inline constexpr AppendArrayOf<Array> kAppendArraysOf[] = {
    {"k_cache", &AppendArrays<Array>::k_cache, true},
    {"v_cache", &AppendArrays<Array>::v_cache, true},
    {"k", &AppendArrays<Array>::k, false},
    {"v", &AppendArrays<Array>::v, false},
    {"cu_new", &AppendArrays<Array>::cu_new, false},
    {"slots", &AppendArrays<Array>::slots, false},
    {"page_table", &AppendArrays<Array>::page_table, false},
    {"page_indptr", &AppendArrays<Array>::page_indptr, false},
    {"kv_lengths", &AppendArrays<Array>::kv_lengths, false},
    {"positions", &AppendArrays<Array>::positions, false},
    {"cos", &AppendArrays<Array>::cos, false},
    {"sin", &AppendArrays<Array>::sin, false},
    {"q", &AppendArrays<Array>::q, false},
    {"q_out", &AppendArrays<Array>::q_out, true},
    {"k_scale", &AppendArrays<Array>::k_scale, false},
    {"v_scale", &AppendArrays<Array>::v_scale, false},
};
using AppendArray = AppendArrayOf<Tensor>;
inline constexpr auto& kAppendArrays = kAppendArraysOf<Tensor>;

// What sentences call an array: of a rotary embedding alone, q is x and q_out is out.
const char* name(const AppendArray& array, bool has_caches);

// Checks arrays as the caller gave them, and brings them to normal form. given: the arrays and
// `interleaved`; `has_caches` says which of the two calls it is. Throws Error.
AppendProblem validate_append(AppendProblem given, bool has_caches);

// Contents of slots, positions, lengths, tables and offsets, for arrays in host memory, before
// anything is written. Throws Error.
void check_contents(const AppendProblem& problem);

// What memory says of a request, and of one of its rows.
AppendRequest request_of(const AppendProblem& problem, i64 sequence);
AppendRow row_of(const AppendProblem& problem, const AppendRequest& request, i64 sequence, i64 row);

// Of a packed append whose contents were checked: the last sequence that begins at or before a row.
i64 find_sequence(const AppendProblem& problem, i64 row);

}  // namespace fulmen
