// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm90 implementation as plans see it: what it refuses, which configs of
// kernels/backward_sm90.cuh a problem gets, how it walks and what lies where in its workspace.
// src/cuda/sm90_backward.cpp compiles and launches it. Pure.
#pragma once

#include "kernels/backward_config.h"
#include "plan/gpu_implementations.h"

namespace fulmen {

std::string sm90_backward_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds sm90_backward_needs(const Problem& problem, const Gpu& gpu);

// The rest is called only where nothing is refused.
BackwardConfig sm90_backward_config(const Problem& problem);
BackwardPrepareConfig sm90_prepare_config(const Problem& problem);

// What a kernel may spill: the loader, one thread, keeps its walk in 24 registers. The consumers'
// loop over full blocks loads at most one spilled word (disassembled, NVRTC 13.0; 576 bytes in all
// without sequences). 816 bytes are the most, of a window over packed sequences, whose speed was
// not measured; refused, they would go to the float32 units.
inline constexpr size_t kSm90BackwardSpillBytes = 832;

// Counts and the order of a run, and where its parts of the workspace begin, in bytes.
struct Sm90BackwardPlan {
  BackwardSchedule schedule;
  i64 num_lines;
  i64 num_kv_blocks;
  i64 num_finish_blocks;
  i64 rows_of_head;  // of what is kept per query row
  i64 num_rows;      // of all heads
  i64 zeroed_bytes;  // sums of dQ and counters
  i64 counters_at;
  i64 rows_at;
  i64 delta_at;
  i64 workspace_bytes;

  i64 num_items() const { return num_lines * num_kv_blocks; }
};
Sm90BackwardPlan sm90_backward_plan(const Problem& problem, const Gpu& gpu);

}  // namespace fulmen
