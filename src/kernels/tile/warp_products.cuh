// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of one warp's rows with a whole tile, by mma.sync: operands come from swizzled tiles
// through ldmatrix, sums stay in registers. A warp owns kRowTiles times 16 rows; every fragment of
// the right operand is read once for all of them. Accumulators are arrays of 8-column fragments,
// four floats each (ptx/mma.cuh): float i of a thread is row l / 4 + 8 (i / 2 % 2), column
// 8 (i / 4) + 2 (l % 4) + i % 2.
#pragma once

#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/sm80_config.h"
#include "kernels/tile/swizzle.cuh"

namespace fulmen {

inline u32 lane_index() { return ptx::thread_index() % 32; }
inline u32 warp_index() { return ptx::thread_index() / 32; }

// Where a lane reads left operands (A, 16 x 16, row by row), from row `row` of the tile on.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> left_rows(const SwizzledTile<kDims, kSwizzled>& tile, u32 row) {
  const u32 lane = lane_index();
  return {tile, row + lane % 16, lane / 16};
}
// Right operands that are transposed rows of the tile (B = T^T: 16 columns of B are 16 rows).
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_rows(const SwizzledTile<kDims, kSwizzled>& tile) {
  const u32 lane = lane_index();
  return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2};
}
// Right operands that are the tile itself (B = T: 16 rows of B are 16 rows).
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_columns(const SwizzledTile<kDims, kSwizzled>& tile) {
  const u32 lane = lane_index();
  return {tile, lane % 16, lane / 16};
}

// S += A B for one step of 16 along the common axis; right(n): fragments of columns 16 n .. + 15.
template <Sm80Config kConfig, i32 kFloats, class Right>
inline void multiply_step(float (&S)[kConfig.row_tiles][kFloats],
                          const u32 (&a)[kConfig.row_tiles][4], const Right& right) {
#pragma unroll
  for (i32 n = 0; n < kFloats / 8; ++n) {
    const ptx::U32x4 b = right(n);
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
      ptx::mma_m16n8k16<kConfig.dtype>(&S[t][8 * n], a[t], b.word[0], b.word[1]);
      ptx::mma_m16n8k16<kConfig.dtype>(&S[t][8 * n + 4], a[t], b.word[2], b.word[3]);
    }
  }
}

// S = A B^T over kDims dims, both row by row in shared memory.
template <Sm80Config kConfig, i32 kDims, i32 kFloats>
inline void multiply_rows(float (&S)[kConfig.row_tiles][kFloats],
                          const LaneRow<kDims, kConfig.swizzle>& left,
                          const LaneRow<kDims, kConfig.swizzle>& right) {
#pragma unroll
  for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) S[t][i] = 0;
  }
#pragma unroll
  for (i32 k = 0; k < kDims / 16; ++k) {
    u32 a[kConfig.row_tiles][4];
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
      const ptx::U32x4 x = ptx::ldmatrix_x4(left.at(k, 16 * t));
#pragma unroll
      for (i32 w = 0; w < 4; ++w) a[t][w] = x.word[w];
    }
    multiply_step<kConfig>(S, a, [&](i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
  }
}

// O += P T: P in registers, 16-bit pairs in the layout of accumulators; T row by row.
template <Sm80Config kConfig, i32 kDims, i32 kWords, i32 kFloats>
inline void multiply_columns(float (&O)[kConfig.row_tiles][kFloats],
                             const u32 (&P)[kConfig.row_tiles][kWords],
                             const LaneRow<kDims, kConfig.swizzle>& right) {
#pragma unroll
  for (i32 k = 0; k < kWords / 4; ++k) {
    u32 a[kConfig.row_tiles][4];
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 w = 0; w < 4; ++w) a[t][w] = P[t][4 * k + w];
    }
    multiply_step<kConfig>(O, a,
                           [&](i32 n) { return ptx::ldmatrix_x4_trans(right.at(n, 16 * k)); });
  }
}

}  // namespace fulmen
