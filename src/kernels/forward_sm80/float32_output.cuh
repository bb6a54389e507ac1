// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The way of a warp's rows of O from float32 products (tile/float32_products.cuh) to global memory:
// the pairs of a quad are 32 bytes in a row, a sector, so they leave from registers, two numbers at
// a time or one by one. Called by forward_sm80; rows that do not count become 0.
#pragma once

#include "kernels/common/head.cuh"
#include "kernels/common/warp_scores.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct Float32Output {
  const Head<kConfig.dtype>& head;
  i32 warp_row;   // the warp's first
  i32 first_dim;  // of V and O

  void store(const float (&O)[kConfig.row_tiles][kConfig.d_v / 2]) const {
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) store_row(O[t], h, warp_row + WarpScores<kConfig>::row(t, h));
    }
  }

 private:
  void store_row(const float (&row)[kConfig.d_v / 2], i32 h, i64 i) const {
    if (i >= head.sequence.q_slot) return;
    const AttentionParams& p = head.p;
    const bool counts = i < head.sequence.shape.q_len;
    const i64 first = head.q_row(p.o, i) + first_dim * p.o.strides[3];
    const i64 num_dims = p.dim_v - first_dim;
#pragma unroll
    for (i32 n = 0; n < kConfig.d_v / 8; ++n) {
      const i64 dim = 8 * n + 2 * static_cast<i32>(lane_index() % 4);
      const float low = counts ? row[4 * n + 2 * h] : 0.f;
      const float high = counts ? row[4 * n + 2 * h + 1] : 0.f;
      if constexpr (kConfig.units) {
        const u64 pair =
            static_cast<u64>(__builtin_bit_cast(u32, high)) << 32 | __builtin_bit_cast(u32, low);
        if (dim < num_dims) *reinterpret_cast<u64*>(p.o.data + (first + dim) * 4) = pair;
      } else {
        if (dim < num_dims) store_real_called(p.o, first + dim * p.o.strides[3], low);
        if (dim + 1 < num_dims) store_real_called(p.o, first + (dim + 1) * p.o.strides[3], high);
      }
    }
  }
};

}  // namespace fulmen
