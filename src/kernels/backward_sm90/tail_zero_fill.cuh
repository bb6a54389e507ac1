// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The warp of backward_sm90's producers that sets rows past a sequence's end to zero in loads that
// have landed.
#pragma once

#include "kernels/backward_sm90/storage.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// One warp that sets rows past the sequence's end to zero in tiles that have landed, before the
// consumers read them: 0 times a NaN that lies there would be NaN. Tiles without such rows go from
// TMA to the consumers directly.
template <BackwardSm90Config kConfig>
struct BackwardTailZeroFill {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  u32 lane;
  typename Shared::QState at;
  typename Shared::DOutState dout_at;
  typename Shared::KvState kv_at;
  u32 phases = 0;  // bit i: which phase of landed barrier i comes next

  // Waits for the tile, clears its rows from `begin` on, and arrives at `full` for the consumers.
  void zero_fill(u32 landed, u32 tile, u32 full, i32 rows, i32 begin) {
    const u32 bit = (landed - shared.k_landed()) / 8;
    ptx::mbarrier_wait(landed, phases >> bit & 1);
    phases ^= 1u << bit;
#pragma unroll 1
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      for (i32 unit = max(begin, 0) * 8 + i32(lane); unit < rows * 8; unit += 32) {
        ptx::store_shared_x4(tile + d * rows * 2 + unit * 16, {});
      }
    }
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  void zero_fill_tile(const BackwardTile& work_tile, i32 num_steps) {
    const auto q = shared.q();
    const auto dout = shared.dout();
    const auto k = shared.k(), v = shared.v();
    const i32 keys = work_tile.shape.kv_len - work_tile.kv_block * kConfig.kv_rows();
    const bool cuts_keys = keys < kConfig.kv_rows();
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    auto step = first_step<kConfig>(params, work_tile, range);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(range)) {
      const i32 queries = work_tile.shape.q_len - step.q_block * kConfig.q_rows;
      const bool cuts_queries = queries < kConfig.q_rows;
      const bool cuts_keys_here = cuts_keys && i == 0;
      const auto do_at = Shared::dout_state(at, dout_at);
      if (cuts_queries)
        zero_fill(shared.q_landed(at), q.address(at), q.full(at), kConfig.q_rows, queries);
      if (cuts_keys_here) {
        zero_fill(shared.k_landed(), k.address(kv_at), k.full(kv_at), kConfig.kv_rows(), keys);
      }
      if (cuts_queries) {
        zero_fill(shared.dout_landed(do_at), dout.address(do_at), dout.full(do_at), kConfig.q_rows,
                  queries);
      }
      if (kConfig.needs_dp() && cuts_keys_here) {
        zero_fill(shared.v_landed(), v.address(kv_at), v.full(kv_at), kConfig.kv_rows(), keys);
      }
      at.advance();
      dout_at.advance();
    }
    if (num_steps > 0) kv_at.advance();
  }

  void run() {
    shared.for_each_tile(lane == 0, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (num_steps > 0) zero_fill_tile(shared.read_tile(work_at), num_steps);
      ptx::warp_sync();
    });
  }
};

}  // namespace fulmen
