// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The compile-time half of the kernels that compute on CUDA cores: naive (one
// thread a row) and simt (tiles). Everything else about a problem is decided at run time, so a
// handful of configs covers every option and head dimension.
#pragma once

#include "kernels/score_options.h"

namespace fulmen {

struct FmaConfig {
  DType dtype = DType::kFloat32;  // of q, and of k, v that are not quantised
  i32 num_threads = 128;          // of a block

  // simt only. A block owns `rows` rows (of queries, or of keys in the pass for dK and dV) and
  // meets `columns` of the others at a time. A warp stands 4 down and 8 across: two warps share
  // groups of 8 rows, and each thread has every 8th row and every 8th column.
  i32 rows = 0;
  i32 columns = 0;
  i32 max_dim_qk = 0;  // multiples of dim_unit()
  i32 max_dim_v = 0;
  // backward_simt_dkdv adds to dQ as well, block after block in any order, once backward_simt_rows
  // has cleared it. Otherwise backward_simt_dq makes dQ, bitwise equal from run to run.
  bool adds_dq = false;
  // Forward: page_table, kv_start, positions or tree is there.
  bool caches = false;
  // Forward: the type of k and v where it has 8 bits.
  DType quantised = DType::kNone;
  bool quantised_q = false;  // and of q; dtype is float32 then
  UserTerms user{};

  constexpr DType kv_dtype() const { return quantised == DType::kNone ? dtype : quantised; }
  constexpr DType q_dtype() const { return quantised_q ? quantised : dtype; }

  constexpr DType real() const {
    return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }
  constexpr i32 real_bytes() const { return static_cast<i32>(size_bytes(real())); }
  constexpr i32 lanes() const { return 16 / real_bytes(); }  // of a 16-byte vector
  constexpr i32 dim_unit() const { return 8 * lanes(); }     // 8 threads, a vector each
  constexpr i32 rows_of_thread() const { return rows / (num_threads / 8); }
  constexpr i32 columns_of_thread() const { return columns / 8; }

  // Q, a tile each of K and V, and the weights of the block; a word.
  constexpr i32 forward_shared_bytes() const {
    return real_bytes() * (rows * max_dim_qk + columns * (max_dim_qk + max_dim_v + rows)) + 16;
  }
  // Two tiles that stay (Q and dO, or K and V), two that change, factors; a number a column, a
  // word.
  constexpr i32 backward_shared_bytes() const {
    return real_bytes() *
               ((rows + columns) * (max_dim_qk + max_dim_v) + columns * rows + 4 * columns) +
           16;
  }
  constexpr bool valid() const {
    return num_threads % 64 == 0 && rows > 0 && rows % (num_threads / 8) == 0 && columns > 0 &&
           columns % 8 == 0 && max_dim_qk > 0 && max_dim_qk % dim_unit() == 0 && max_dim_v > 0 &&
           max_dim_v % dim_unit() == 0;
  }
};

template <class Each>
constexpr void for_each_field(const FmaConfig& config, Each each) {
  each("dtype", config.dtype);
  each("num_threads", config.num_threads);
  each("rows", config.rows);
  each("columns", config.columns);
  each("max_dim_qk", config.max_dim_qk);
  each("max_dim_v", config.max_dim_v);
  each("adds_dq", config.adds_dq);
  each("caches", config.caches);
  each("quantised", config.quantised);
  each("quantised_q", config.quantised_q);
  each("user", config.user);
}

}  // namespace fulmen
