// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of one warp's rows with a whole tile, by mma.sync: operands come from swizzled tiles
// through ldmatrix, sums stay in registers. A warp owns row_tiles times 16 rows; every fragment of
// the right operand is read once for all of them. Accumulators are arrays of 8-column fragments,
// four floats each (ptx/mma.cuh): float i of a thread is row l / 4 + 8 (i / 2 % 2), column
// 8 (i / 4) + 2 (l % 4) + i % 2, or, interleaved, see Sm80Config.
#pragma once

#include "kernels/common/swizzle.cuh"
#include "kernels/forward_sm80/config.h"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

inline u32 lane_index() { return ptx::thread_index() % 32; }
inline u32 warp_index() { return ptx::thread_index() / 32; }

template <i32 kTiles, i32 kFloats>
inline void clear(float (&C)[kTiles][kFloats]) {
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) C[t][i] = 0;
  }
}

// Where a lane reads left operands (A, 16 x 16, row by row), from row `row` of the tile on.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> left_rows(const SwizzledTile<kDims, kSwizzled>& tile, u32 row) {
  const u32 lane = lane_index();
  return {tile, row + lane % 16, lane / 16};
}
// Right operands that are transposed rows of the tile (B = T^T: 16 columns of B are 16 rows).
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_rows(const SwizzledTile<kDims, kSwizzled>& tile, u32 row = 0) {
  const u32 lane = lane_index();
  return {tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2};
}
// Right operands that are the tile itself (B = T: 16 rows of B are 16 rows), from unit pair `pair`
// on.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_columns(const SwizzledTile<kDims, kSwizzled>& tile, u32 pair = 0) {
  const u32 lane = lane_index();
  return {tile, lane % 16, 2 * pair + lane / 16};
}

// S += A B over kSteps steps of 16 along the common axis; left(k, t): A's fragment of row tile t,
// right(k, n): B's of columns 16 n .. + 15.
template <Sm80Config kConfig, i32 kSteps, i32 kFloats, class Left, class Right>
inline void multiply(float (&S)[kConfig.row_tiles][kFloats], const Left& left, const Right& right) {
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
    ptx::U32x4 a[kConfig.row_tiles];
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) a[t] = left(k, t);
#pragma unroll
    for (i32 n = 0; n < kFloats / 8; ++n) {
      const ptx::U32x4 b = right(k, n);
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
        ptx::mma_m16n8k16<kConfig.dtype>(&S[t][8 * n], a[t].word, b.word[0], b.word[1]);
        ptx::mma_m16n8k16<kConfig.dtype>(&S[t][8 * n + 4], a[t].word, b.word[2], b.word[3]);
      }
    }
  }
}

// S = A B^T over kDims dims; B row by row in shared memory.
template <Sm80Config kConfig, i32 kDims, i32 kFloats, class Left>
inline void multiply_rows(float (&S)[kConfig.row_tiles][kFloats], const Left& left,
                          const LaneRow<kDims, kConfig.swizzle>& right) {
  clear(S);
  multiply<kConfig, kDims / 16>(
      S, left, [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
}

// O += P T over kRows rows of T, which lies row by row; of its pairs of units every kStride-th.
template <Sm80Config kConfig, i32 kRows, i32 kStride, i32 kDims, i32 kFloats, class Left>
inline void multiply_columns(float (&O)[kConfig.row_tiles][kFloats], const Left& left,
                             const LaneRow<kDims, kConfig.swizzle>& right) {
  multiply<kConfig, kRows / 16>(
      O, left, [&](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(right.at(kStride * n, 16 * k)); });
}

}  // namespace fulmen
