// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Zeros for the float32 sums of dQ just before they are needed, so that they lie in the L2 when
// blocks add to them: a block of keys clears its share of a group of heads that comes later, and
// waits until blocks before it have cleared its own group's. The first groups are cleared by
// backward_rows_sm80. Called by backward_sm80, all threads of a block together.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/sm80_backward_config.h"
#include "kernels/tile_tasks.cuh"

namespace fulmen {

// Tiles of queries of a group of key/value heads.
inline i64 row_tiles_of_group(const Sm80BackwardParams& params, i32 rows) {
  const AttentionParams& p = params.attention;
  return params.lines_per_group * p.group_size() * num_tile_slots(p, p.q_rows, rows);
}

// Those of tile `number` of queries.
template <Sm80BackwardConfig kConfig, i32 kThreads>
inline void clear_dq_sums(const Sm80BackwardParams& params, i64 number) {
  float* const sums = params.dq_sums + number * kConfig.dq_elems();
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
  u32 blocks_of_group;

  void clear() const {
    if constexpr (!kConfig.dq) return;
    const u32 own = block / blocks_of_group;
    const u32 distance = static_cast<u32>(params.groups_ahead);
    const bool clears = clear_share(own + distance);
    ptx::block_sync();  // the share is cleared
    if (ptx::thread_index() != 0) return;
    if (clears) ptx::announce(params.cleared + own + distance);
    if (own >= distance) ptx::await(params.cleared + own, blocks_of_group);
  }

 private:
  // This block's share of the tiles of a group; false past the last one.
  bool clear_share(u32 group) const {
    const i64 all = num_q_tiles(params.attention, kConfig.rows);
    const i64 tiles = row_tiles_of_group(params, kConfig.rows);
    const i64 first = group * tiles;
    if (first >= all) return false;
    const i64 share = ceil_div(tiles, i64{blocks_of_group});
    const i64 begin = first + block % blocks_of_group * share;
    const i64 end = min(min(begin + share, first + tiles), all);
#pragma unroll 1
    for (i64 tile = begin; tile < end; ++tile) {
      clear_dq_sums<kConfig, kConfig.threads()>(params, tile);
    }
    return true;
  }
};

}  // namespace fulmen
