// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Entries of lengths, offsets and rng that are out of range: kernels clamp them (sequence.cuh), and
// every kernel of a call tells the host so. The threads of a grid look at one sequence each.
#pragma once

#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

inline __attribute__((noinline)) void record_faults(const AttentionParams& p, i32 num_threads) {
  if (p.faults == nullptr) return;
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  u32 found = 0;
  if (thread == 0 && p.rng != nullptr && (p.rng[1] < 0 || p.rng[1] >> 32 != 0)) found = kFaultRng;
  if (p.packed.q || p.q_lengths.present() || p.kv_lengths.present()) {
    for (i64 i = thread; i < p.num_sequences; i += all_threads) {
      found |=
          axis_faults(axis_entry(p.cu_q, p.q_lengths, i), p.q_rows, kFaultQOffsets, kFaultQLengths);
      found |= axis_faults(axis_entry(p.cu_kv, p.kv_lengths, i), p.kv_rows, kFaultKvOffsets,
                           kFaultKvLengths);
    }
  }
  if (found != 0) ptx::set_bits(p.faults, found);
}

}  // namespace fulmen
