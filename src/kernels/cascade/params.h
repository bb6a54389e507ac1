// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the two kernels around the passes of a cascade are compiled for and launched with
// (cascade.cuh): prepare before, combine behind them. A cascade reads the keys that all requests
// share once: rows of all requests and of all heads of a group, packed, are one sequence of rows
// over each of num_parts parts of these keys, and every request has the keys behind them to itself.
// Passed by value.
#pragma once

#include "kernels/params.h"

namespace fulmen {

struct CascadeConfig {
  DType dtype = DType::kBFloat16;  // of q: 16 bits
  i32 num_threads = 128;           // of a block
};

template <class Each>
constexpr void for_each_field(const CascadeConfig& config, Each each) {
  each("dtype", config.dtype);
  each("num_threads", config.num_threads);
}

struct CascadeParams {
  static constexpr i32 kMaxParts = 31;  // and a request's own keys: one state a lane

  AttentionParams attention;  // of the call
  ArrayView kv_shared;        // (1, 1, 1, sequence)
  i32 num_parts;
  i32 chunk_pages;  // a part begins at a multiple of so many pages of the shared keys

  // Written by prepare: the numbers of the two passes, and the packed rows of q.
  i32* kv_start;    // (sequence): where the own keys of a request begin
  i32* page_begin;  // (part + 1): the entries of the page table that a part has
  i32* kv_lengths;  // (part)
  u16* q;           // (part, head, row, dim_qk): the same for each part

  // What the passes leave: normalised o, and its row max and row sum apart.
  const float* shared_o;      // (part, head, row, dim_v)
  const float* shared_stats;  // (part, head, row, 2)
  const float* own_o;         // (head, row, dim_v)
  const float* own_stats;     // (head, row, 2)

  // Rows of all requests: those of q, one batch entry behind the other.
  constexpr i64 rows() const { return attention.batch_extent() * attention.q_rows; }
};
static_assert(sizeof(CascadeParams) <= 4096);

}  // namespace fulmen
