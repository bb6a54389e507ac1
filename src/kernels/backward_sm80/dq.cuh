// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The float32 accumulators of dQ: their layout, and their zeros just before they are needed, so
// that they lie in the L2 when blocks add to them. A block of keys zeroes its share of a group of
// heads that comes later, and adds to its own group's once blocks before it have zeroed them. The
// first groups, or all without config.zeroes_dq, are zeroed by backward_preprocess_sm80.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// In which order the tiles of a warp's dQ lie in dq_accum: as its lanes hold them, so that a warp
// adds to 128 neighbouring bytes, or 512, at a time.
template <BackwardSm80Config kConfig>
struct DqAccumLayoutSm80 {
  static constexpr i32 kFloats = kConfig.dq_dims / 2;  // of a thread, of 16 rows
  static constexpr i32 kTileElems = kConfig.dq_rows * kConfig.dq_dims;

  // Float i of lane `lane`, of 16 rows `t`, of tile `tile`.
  static constexpr i32 index(i32 tile, i32 t, i32 i, i32 lane) {
    const i32 group = t * (kFloats / 4) + i / 4;
    return tile * kTileElems +
           (kConfig.hopper ? (group * 32 + lane) * 4 + i % 4 : (group * 4 + i % 4) * 32 + lane);
  }
};

// Zeroes dQ of m_block `number`; all threads of a block.
template <BackwardSm80Config kConfig, i32 kThreads>
inline void zero_dq_accum(const BackwardSm80Params& params, u32 number) {
  float* const sums = params.dq_accum + i64{number} * kConfig.dq_elems();
  const i32 thread = static_cast<i32>(ptx::thread_index());
#pragma unroll
  for (i32 at = 0; at < kConfig.dq_elems(); at += 4 * kThreads) {
    if (at + 4 * thread < kConfig.dq_elems()) {
      ptx::store_l2_x4(sums + at + 4 * thread, {{0, 0, 0, 0}});
    }
  }
}

template <BackwardSm80Config kConfig>
struct DqZeroingSm80 {
  const BackwardSm80Params& params;
  u32 block;

  // Stores zeros; wait_zeroed() comes a barrier later, when they have arrived.
  void store_zeros() const {
    if constexpr (!kConfig.zeroes_dq) return;
    const HeadGroupsSm80& groups = params.groups;
    const u32 first = ahead() * groups.m_blocks;
    const u32 begin = first + block % groups.n_blocks * groups.m_blocks_each;
    const u32 end =
        min(min(begin + groups.m_blocks_each, first + groups.m_blocks), groups.all_m_blocks);
#pragma unroll 1
    for (u32 tile = begin; tile < end; ++tile) {
      zero_dq_accum<kConfig, kConfig.threads()>(params, tile);
    }
  }

  // Thread 0 announces the zeros and waits for those of the block's own group; the others may add
  // to them after the next barrier.
  void wait_zeroed() const {
    if constexpr (!kConfig.zeroes_dq) return;
    if (ptx::thread_index() != 0) return;
    const HeadGroupsSm80& groups = params.groups;
    if (ahead() * groups.m_blocks < groups.all_m_blocks)
      ptx::announce(params.zeroed_blocks + ahead());
    if (own() >= groups.ahead) ptx::await(params.zeroed_blocks + own(), groups.n_blocks);
  }

  // For a block that adds nothing.
  void zero_only() const {
    if constexpr (!kConfig.zeroes_dq) return;
    store_zeros();
    ptx::block_sync();
    wait_zeroed();
  }

 private:
  u32 own() const { return block / params.groups.n_blocks; }
  u32 ahead() const { return own() + params.groups.ahead; }
};

}  // namespace fulmen
