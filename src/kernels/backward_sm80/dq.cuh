// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Zeros for the float32 sums of dQ just before they are needed, so that they lie in the L2 when
// blocks add to them: a block of keys clears its share of a group of heads that comes later, and
// adds to its own group's sums once blocks before it have cleared them. The first groups, or all
// without config.clears_ahead, are cleared by backward_preprocess_sm80. Called by backward_sm80,
// all threads of a block together.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// In which order the tiles of a warp's dQ lie in dq_sums: as its lanes hold them, so that a warp
// adds to 128 neighbouring bytes, or 512, at a time.
template <Sm80BackwardConfig kConfig>
struct Sm80DqOrder {
  static constexpr i32 kFloats = kConfig.dq_dims / 2;  // of a thread, of 16 rows
  static constexpr i32 kTileElems = kConfig.dq_rows * kConfig.dq_dims;

  // Float i of lane `lane`, of 16 rows `t`, of tile `tile`.
  static constexpr i32 index(i32 tile, i32 t, i32 i, i32 lane) {
    const i32 group = t * (kFloats / 4) + i / 4;
    return tile * kTileElems +
           (kConfig.hopper ? (group * 32 + lane) * 4 + i % 4 : (group * 4 + i % 4) * 32 + lane);
  }
};

// Those of tile `number` of queries.
template <Sm80BackwardConfig kConfig, i32 kThreads>
inline void clear_dq_sums(const Sm80BackwardParams& params, u32 number) {
  float* const sums = params.dq_sums + i64{number} * kConfig.dq_elems();
  const i32 thread = static_cast<i32>(ptx::thread_index());
#pragma unroll
  for (i32 at = 0; at < kConfig.dq_elems(); at += 4 * kThreads) {
    if (at + 4 * thread < kConfig.dq_elems()) {
      ptx::store_l2_x4(sums + at + 4 * thread, {{0, 0, 0, 0}});
    }
  }
}

template <Sm80BackwardConfig kConfig>
struct BackwardSumsSm80 {
  const Sm80BackwardParams& params;
  u32 block;

  // Stores zeros; settle() comes a barrier later, when they have arrived.
  void clear() const {
    if constexpr (!kConfig.clears_ahead) return;
    const Sm80Groups& groups = params.groups;
    const u32 first = ahead() * groups.row_tiles;
    const u32 begin = first + block % groups.blocks * groups.row_tiles_each;
    const u32 end =
        min(min(begin + groups.row_tiles_each, first + groups.row_tiles), groups.all_row_tiles);
#pragma unroll 1
    for (u32 tile = begin; tile < end; ++tile) {
      clear_dq_sums<kConfig, kConfig.threads()>(params, tile);
    }
  }

  // Thread 0 says so, and waits for the zeros of the block's own group; the others may add to them
  // after the next barrier.
  void settle() const {
    if constexpr (!kConfig.clears_ahead) return;
    if (ptx::thread_index() != 0) return;
    const Sm80Groups& groups = params.groups;
    if (ahead() * groups.row_tiles < groups.all_row_tiles) ptx::announce(params.cleared + ahead());
    if (own() >= groups.ahead) ptx::await(params.cleared + own(), groups.blocks);
  }

  // For a block that adds nothing.
  void only_clear() const {
    if constexpr (!kConfig.clears_ahead) return;
    clear();
    ptx::block_sync();
    settle();
  }

 private:
  u32 own() const { return block / params.groups.blocks; }
  u32 ahead() const { return own() + params.groups.ahead; }
};

}  // namespace fulmen
