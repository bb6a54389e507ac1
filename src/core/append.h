// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_append_kv and fulmen_rotary as every backend takes them: arrays in normal form, and sizes.
// A rotary embedding alone is an append without caches. Where a row goes is said once, in
// kernels/attention/append_row.cuh.
#pragma once

#include "core/tensor.h"
#include "kernels/attention/append_row.cuh"

namespace fulmen {

struct AppendProblem {
  Tensor k_cache;      // (page, kv_head, row of the page, dim_qk): written
  Tensor v_cache;      // (page, kv_head, row of the page, dim_v): written
  Tensor k;            // (batch, kv_head, row, dim_qk)    batch is 1 when packed
  Tensor v;            // (batch, kv_head, row, dim_v)
  Tensor cu_new;       // (1, 1, 1, sequence + 1)
  Tensor slots;        // (batch, 1, 1, row)
  Tensor page_table;   // (sequence, 1, 1, page of the request), or (1, 1, 1, entry)
  Tensor page_indptr;  // (1, 1, 1, sequence + 1)
  Tensor kv_lengths;   // (1, 1, 1, sequence)
  Tensor positions;    // (batch, 1, 1, row)
  Tensor cos;          // (1, 1, position, pair)
  Tensor sin;          // (1, 1, position, pair)
  Tensor q;            // (batch, head, row, dim_qk)
  Tensor q_out;        // (batch, head, row, dim_qk): written; may be q
  bool interleaved = false;

  DType dtype = DType::kNone;  // of k, v and q
  AppendExtents extents;
  i64 batch = 0;  // of k, v and q
  i64 kv_heads = 0;
  i64 heads = 0;  // of q
  i64 dim_qk = 0;
  i64 dim_v = 0;

  bool has_caches() const { return k_cache.present(); }
  bool rotates() const { return cos.present(); }
  i64 rotary_dim() const { return rotates() ? 2 * cos.shape[3] : 0; }
};

// Each array of an append, with its name in fulmen.h.
struct AppendArray {
  const char* name;
  Tensor AppendProblem::* member;
  bool is_written;
};
inline constexpr AppendArray kAppendArrays[] = {
    {"k_cache", &AppendProblem::k_cache, true},
    {"v_cache", &AppendProblem::v_cache, true},
    {"k", &AppendProblem::k, false},
    {"v", &AppendProblem::v, false},
    {"cu_new", &AppendProblem::cu_new, false},
    {"slots", &AppendProblem::slots, false},
    {"page_table", &AppendProblem::page_table, false},
    {"page_indptr", &AppendProblem::page_indptr, false},
    {"kv_lengths", &AppendProblem::kv_lengths, false},
    {"positions", &AppendProblem::positions, false},
    {"cos", &AppendProblem::cos, false},
    {"sin", &AppendProblem::sin, false},
    {"q", &AppendProblem::q, false},
    {"q_out", &AppendProblem::q_out, true},
};

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
