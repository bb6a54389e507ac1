// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The compile-time half of the kernels that compute on the ordinary arithmetic units: naive (one
// thread a row) and simt (tiles). Everything else about a problem is decided at run time, so a
// handful of configs covers every option and head dimension.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// The C++ type of an element, and the type in which a kernel computes with it.
template <DType kDType>
struct ElementOf {
  using Type = float;
  using Real = float;
};
template <>
struct ElementOf<DType::kFloat64> {
  using Type = double;
  using Real = double;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = f16;
  using Real = float;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = bf16;
  using Real = float;
};

struct FmaConfig {
  DType dtype = DType::kFloat32;  // of q, k, v
  i32 num_threads = 128;          // of a block

  // simt only. A block owns `rows` rows (of queries, or of keys in the pass for dK and dV) and
  // meets `columns` of the others at a time; its side * side threads (num_threads) stand in a
  // square, each with rows / side rows and columns / side columns.
  i32 side = 0;
  i32 rows = 0;
  i32 columns = 0;
  i32 max_dim_qk = 0;  // multiples of side * lanes()
  i32 max_dim_v = 0;

  constexpr i32 real_bytes() const { return dtype == DType::kFloat64 ? 8 : 4; }
  constexpr i32 lanes() const { return 16 / real_bytes(); }  // of a 16-byte vector
  constexpr i32 max_dim() const { return max(max_dim_qk, max_dim_v); }

  // Shared memory. Rows of a tile lie 16 bytes further apart than they are long, so that eight
  // neighbouring rows meet all 32 banks with 16 bytes each.
  constexpr i32 tile_elems(i32 tile_rows, i32 dim) const { return tile_rows * (dim + lanes()); }
  // Q and one tile of K or V, then the weights of the block.
  constexpr i32 forward_shared_bytes() const {
    return real_bytes() * (tile_elems(rows, max_dim_qk) + tile_elems(columns, max_dim()) +
                           tile_elems(rows, columns)) +
           16;
  }
  // Two tiles that stay (Q and dO, or K and V), one that changes, one of factors, one number a
  // column.
  constexpr i32 backward_shared_bytes() const {
    return real_bytes() * (tile_elems(rows, max_dim_qk) + tile_elems(rows, max_dim_v) +
                           tile_elems(columns, max_dim()) + tile_elems(rows, columns) + columns) +
           16;
  }
  constexpr bool valid() const {
    return side > 0 && num_threads == side * side && rows % side == 0 && columns % side == 0 &&
           columns % lanes() == 0 && max_dim_qk % (side * lanes()) == 0 &&
           max_dim_v % (side * lanes()) == 0;
  }
};

}  // namespace fulmen
