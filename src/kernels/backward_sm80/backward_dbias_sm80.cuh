// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dbias beside backward_sm80: before it, zeros for the pairs that it never meets; or after it, its
// sums, rounded, where config.sums_dbias. Launched with any number of blocks.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/common/array_access.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

inline constexpr i32 kSm80DbiasThreads = 256;

template <Sm80BackwardConfig kConfig>
void backward_dbias_sm80(const Sm80BackwardParams& params) {
  const AttentionParams& p = params.attention;
  const i64(&extents)[4] = p.dbias_extents;
  const i64 num_rows = extents[0] * extents[1] * extents[2];
  for (i64 row = ptx::block_index(); row < num_rows; row += ptx::num_blocks()) {
    const i64 line = row / extents[2];
    const i64 to = p.dbias.offset(line / extents[1], line % extents[1], row % extents[2], 0);
    if constexpr (kConfig.tiled_dbias) {
      u16* const row_to = reinterpret_cast<u16*>(p.dbias.data) + to;
      for (i64 key = 8 * ptx::thread_index(); key < extents[3]; key += 8 * kSm80DbiasThreads) {
        ptx::store_global_x4(row_to + key, {});
      }
      continue;
    }
    for (i64 key = ptx::thread_index(); key < extents[3]; key += kSm80DbiasThreads) {
      const float x = kConfig.sums_dbias ? params.dbias_sums[row * extents[3] + key] : 0.f;
      store_real(p.dbias, to + key * p.dbias.strides[3], x);
    }
  }
}

}  // namespace fulmen
