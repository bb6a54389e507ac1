// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of dQ: float32 sums, once all blocks of keys have added to them, become dq; rows past the
// end of their sequence 0. A warp takes up what a warp has added, and as it lies. Called by
// backward_finish_sm80.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/backward_sm80/row_store.cuh"
#include "kernels/common/head.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardRoundingSm80 {
  using Order = Sm80DqOrder<kConfig>;
  // Tiles of 16 rows at once: as many as registers hold.
  static constexpr i32 kTiles = min(kConfig.dq_rows / 16, max(32 / Order::kFloats, 1));
  using Sums = float[kTiles][Order::kFloats];

  const Head<kConfig.dtype>& head;
  i64 first_row;  // of the tile
  const float* sums;

  // A tile of queries, by `num_warps` warps.
  void run(i32 num_warps) const {
#pragma unroll 1
    for (i32 tile = static_cast<i32>(warp_index()); tile < kConfig.dq_tiles(); tile += num_warps) {
#pragma unroll 1
      for (i32 first = 0; first < kConfig.dq_rows / 16; first += kTiles) {
        Sums dQ;
        read(dQ, tile, first);
        store(dQ, tile, first);
      }
    }
  }

 private:
  void read(Sums& dQ, i32 tile, i32 first) const {
    const float* const from = sums + i64{tile} * Order::kTileElems +
                              Order::index(0, first, 0, static_cast<i32>(lane_index()));
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < Order::kFloats; i += 4) {
        const float* const at = from + Order::index(0, t, i, 0);
        if constexpr (kConfig.hopper) {
          const ptx::F32x4 x = ptx::load_l2_x4(at);
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = x.word[e];
        } else {
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = ptx::load_l2(at + 32 * e);
        }
      }
    }
  }

  void store(const Sums& dQ, i32 tile, i32 first) const {
    constexpr i32 kAcross = kConfig.d_qk / kConfig.dq_dims;
    const AttentionParams& p = head.p;
    const Sequence& sequence = head.sequence;
    const i32 dim = tile % kAcross * kConfig.dq_dims;
    if (dim >= p.dim_qk) return;
    const i64 row = first_row + tile / kAcross * kConfig.dq_rows + 16 * first + lane_index() / 4;
    const RowStore store(p.dq, kConfig.dtype, head.q_row(p.dq, row) + dim * p.dq.strides[3],
                         min<i64>(p.dim_qk - dim, kConfig.dq_dims));
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 below = 16 * t + 8 * h;
        store.template run<kConfig.dtype>(dQ[t], h, below, row + below < sequence.q_slot,
                                          row + below < sequence.shape.q_len,
                                          static_cast<float>(p.score_map.scale));
      }
    }
  }
};

}  // namespace fulmen
