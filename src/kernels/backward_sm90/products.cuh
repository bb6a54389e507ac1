// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The five matrix products of the backward pass, as batches of wgmma that are issued and committed
// here and waited for by the caller. A warpgroup owns 64 keys, so that S^T and dP^T lie in its
// registers in the layout in which P^T and dS^T are left operands again. Tiles in shared memory are
// chunks of 64 columns (128 bytes, swizzled), one chunk after another.
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/common/operand_tile.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace fulmen {

template <BackwardConfig kConfig>
using BackwardScores = float[kConfig.q_rows / 2];  // S^T, P^T, dP^T: 64 keys by q_rows
template <BackwardConfig kConfig>
using BackwardWeights = u32[kConfig.q_rows / 4];  // P^T, dS^T, rounded
template <BackwardConfig kConfig>
using BackwardSums = float[kConfig.dims / 2];  // dK, dV: 64 keys by dims
// The first register_dims columns of 64 rows of K or V as left operands.
template <BackwardConfig kConfig>
using BackwardKeys = u32[max(kConfig.register_dims / 4, 1)];

template <BackwardConfig kConfig>
inline void load_keys(BackwardKeys<kConfig>& rK, u32 keys) {
  load_left_columns<kConfig.register_dims>(rK, OperandTile<kConfig.kv_rows(), true>{keys});
}

// S^T = K Q^T or dP^T = V dO^T. rK, keys: the first columns of K or V, as many as are in registers
// (none in a single word); the warpgroup's first row in a tile of kv_rows() rows.
template <BackwardConfig kConfig, i32 kWords>
inline void issue_keys_by_queries(BackwardScores<kConfig>& S, const u32 (&rK)[kWords], u32 keys,
                                  u32 queries) {
  const u32 a = ptx::wgmma_descriptor(keys, 16);
  const u32 b = ptx::wgmma_descriptor(queries, 16);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 d = 0; d < kConfig.dims; d += 16) {
    const u32 a_offset = d / 64 * kConfig.kv_rows() * 128 + d % 64 * 2;
    const u32 b_offset = d / 64 * kConfig.q_rows * 128 + d % 64 * 2;
    if constexpr (kWords > 1) {
      if (d < kWords * 4) {
        const u32* r = rK + d / 4;
        ptx::wgmma_rs<kConfig.dtype, false>(S, r[0], r[1], r[2], r[3], b + (b_offset >> 4), d > 0);
        continue;
      }
    }
    ptx::wgmma_ss<kConfig.dtype, false>(S, a + (a_offset >> 4), b + (b_offset >> 4), d > 0);
  }
  ptx::wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, over queries [kBegin, kEnd) of the step; without the old value
// unless `accumulate`.
template <BackwardConfig kConfig, i32 kBegin = 0, i32 kEnd = kConfig.q_rows>
inline void issue_keys_by_dims(BackwardSums<kConfig>& sums, const BackwardWeights<kConfig>& W,
                               u32 queries, bool accumulate) {
  const u32 b = ptx::wgmma_descriptor(queries, kConfig.q_rows * 128);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 q = kBegin; q < kEnd; q += 16) {
    const u32* a = W + q / 4;
    ptx::wgmma_rs<kConfig.dtype, true>(sums, a[0], a[1], a[2], a[3], b + (q * 128 >> 4),
                                       q > 0 || accumulate);
  }
  ptx::wgmma_commit();
}

// This warpgroup's part of dQ = dS K: its 64 rows, or its half of the columns.
template <BackwardConfig kConfig>
inline void issue_queries_by_dims(float (&dQ)[kConfig.dq_floats()], u32 ds, u32 k, u32 warpgroup) {
  static_assert(kConfig.dims == (kConfig.dq_by_rows() ? 64 : 128));
  const u32 a = ptx::wgmma_descriptor(ds + (kConfig.dq_by_rows() ? warpgroup * 64 * 128 : 0), 16);
  const u32 b = ptx::wgmma_descriptor(
      k + (kConfig.dq_by_rows() ? 0 : warpgroup * kConfig.kv_rows() * 128), 16);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 j = 0; j < kConfig.kv_rows(); j += 16) {
    const u32 a_offset = j / 64 * kConfig.q_rows * 128 + j % 64 * 2;
    ptx::wgmma_ss<kConfig.dtype, true>(dQ, a + (a_offset >> 4), b + (j * 128 >> 4), j > 0);
  }
  ptx::wgmma_commit();
}

// dS^T of a warpgroup becomes its 64 columns of dS in shared memory.
template <BackwardConfig kConfig>
inline void store_ds(const BackwardWeights<kConfig>& dS, u32 ds, u32 warpgroup) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 lane = thread % 32;
  const u32 unit = thread / 32 * 2 + lane / 8 % 2;  // 16 bytes, exchanged by row % 8
  const u32 row = lane / 16 * 8 + lane % 8;
  const u32 chunk = ds + warpgroup * kConfig.q_rows * 128;
#pragma unroll
  for (i32 q = 0; q < kConfig.q_rows; q += 16) {
    const u32* w = dS + q / 4;
    ptx::stmatrix_x4_trans(chunk + (q + row) * 128 + ((unit ^ row % 8) << 4),
                           {{w[0], w[1], w[2], w[3]}});
  }
}

}  // namespace fulmen
