// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Counters in global memory around the sums of dQ. In deterministic mode blocks of keys add to a
// tile of dQ in one order: DqSemaphoreAcquire waits until the block before has dq_added,
// DqSemaphoreRelease counts it after this one has. In every mode DqSemaphoreRelease counts the work
// tiles whose dQ has arrived, which says when dQ can be converted. Two threads, since each waits
// for memory in every step.
#pragma once

#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// In deterministic mode: the counter of blocks of keys that have added to dQ of a step.
template <BackwardSm90Config kConfig>
inline u32* dq_semaphore_of(const BackwardParams& params, const BackwardTile& work_tile,
                            const BackwardStep& step) {
  const i64 first_row =
      first_padded_row<kConfig>(params, work_tile.batch_kv_head, work_tile.q_begin);
  return params.dq_semaphore +
         (first_row + step.head * params.padded_rows_per_head) / kConfig.q_rows + step.q_block;
}

// Lets the consumers add dQ of a step when the block of keys before has added to the same rows.
// Every block is claimed after the one before it and takes the same steps behind it.
template <BackwardSm90Config kConfig>
struct DqSemaphoreAcquire {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsState at = {};

  void acquire_steps(const BackwardTile& work_tile, i32 num_steps) {
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    BackwardStep step(range);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(range)) {
      ptx::await(dq_semaphore_of<kConfig>(params, work_tile, step),
                 arrivals_before<kConfig>(params, step.q_block, work_tile.kv_block));
      ptx::mbarrier_wait(shared.dq_released(at), at.phase ^ 1);
      ptx::mbarrier_arrive(shared.dq_semaphore().full(at));
      at.advance();
    }
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (num_steps > 0) acquire_steps(shared.read_tile(work_at), num_steps);
    });
  }
};

// Counts in global memory what has been added to dQ: work tiles, and in deterministic mode steps.
template <BackwardSm90Config kConfig>
struct DqSemaphoreRelease {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsState at = {};

  void release_steps(const BackwardTile& work_tile, i32 num_steps) {
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    BackwardStep step(range);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(range)) {
      u32* const dq_semaphore = dq_semaphore_of<kConfig>(params, work_tile, step);
      ptx::mbarrier_wait(shared.dq_semaphore().empty(at), at.phase);
      ptx::announce(dq_semaphore);
      ptx::mbarrier_arrive(shared.dq_released(at));
      at.advance();
    }
  }

  void release_tile(typename Shared::WorkState work_at) const {
    ptx::mbarrier_wait(shared.dq_added(work_at), work_at.phase);
    ptx::announce(params.done + shared.read_tile(work_at).batch_kv_head);
    if constexpr (!kConfig.dq) return;
    const i32 converted = shared.read_conversion(work_at).batch_kv_head;
    if (converted >= 0 && is_reused<kConfig>(params, converted)) {
      ptx::announce(params.freed + converted);
    }
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (kConfig.deterministic && num_steps > 0)
        release_steps(shared.read_tile(work_at), num_steps);
      if (num_steps >= 0) release_tile(work_at);
    });
  }
};

}  // namespace fulmen
