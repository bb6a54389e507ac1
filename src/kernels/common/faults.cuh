// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Entries of lengths, offsets and rng that are out of range: they count as empty (sequence.cuh),
// and every kernel of a call tells the host so. The threads of a grid look at one sequence each.
#pragma once

#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Tells the host of the faults whose bits are set; null: of none.
inline void report(FaultBytes* faults, u32 found) {
  if (faults == nullptr || found == 0) return;
#pragma unroll
  for (i32 i = 0; i < kNumFaults; ++i) {
    if (found >> i & 1) ptx::set_flag(&faults->met[i]);
  }
}

// An offset of dropout beyond 32 bits. By all threads of the grid.
inline void record_rng_fault(const AttentionParams& p) {
  if (ptx::block_index() != 0 || ptx::thread_index() != 0) return;
  if (p.rng != nullptr && (p.rng[1] < 0 || p.rng[1] >> 32 != 0)) report(p.faults, kFaultRng);
}

inline __attribute__((noinline)) void record_faults(const AttentionParams& p, i32 num_threads) {
  if (p.faults == nullptr) return;
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  record_rng_fault(p);
  u32 found = 0;
  if (p.packed.q || p.q_lengths.present() || p.kv_lengths.present()) {
    for (i64 i = thread; i < p.num_sequences; i += all_threads) {
      found |=
          axis_faults(axis_entry(p.cu_q, p.q_lengths, i), p.q_rows, kFaultQOffsets, kFaultQLengths);
      found |= axis_faults(axis_entry(p.cu_kv, p.kv_lengths, i), p.kv_rows, kFaultKvOffsets,
                           kFaultKvLengths);
    }
  }
  report(p.faults, found);
}

}  // namespace fulmen
