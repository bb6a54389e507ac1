// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm90 implementation as plans see it: what it refuses, which configs of
// kernels/backward_sm90/backward_sm90.cuh a problem gets, how it walks and what lies where in its
// workspace. src/gpu/backward_sm90/run.cpp compiles and launches it. Pure.
#pragma once

#include "gpu/function_plan.h"
#include "kernels/backward_sm90/config.h"

namespace fulmen {

std::string sm90_backward_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds sm90_backward_needs(const Problem& problem, const Gpu& gpu);

// The rest is called only where nothing is refused.

// Whether dQ has a kernel of its own, backward_dq_sm90: seven products of a pair of tiles instead
// of five (eight above 128 dims), but nothing is added in global memory.
bool sm90_separate_dq(const Problem& problem);
ForwardSm90Config sm90_dq_config(const Problem& problem);

// The optimisations that its kernels can be made without.
u32 sm90_backward_switches(const Problem& problem);

// The launches of backward_sm90: one, or one for each of dK and dV above 128 dims.
std::vector<BackwardSm90Config> sm90_backward_configs(const Problem& problem);

// Whether the mask hides pairs inside of blocks, so that a careful pass stands behind.
bool sm90_hides_pairs(const Problem& problem);

// Whether documents leave out blocks of queries (DocumentBlocks).
bool sm90_has_document_blocks(const Problem& problem);

BackwardPreprocessConfig sm90_preprocess_config(const Problem& problem);

// What a kernel may spill: the loaders, a thread each, and the warps beside them keep their walks
// in 24 registers. The consumers' loop over full blocks loads at most one spilled word
// (disassembled, NVRTC 13.0; 320 bytes in all without sequences). A window over packed sequences
// has 964; more would go to the float32 units.
inline constexpr size_t kSm90BackwardSpillBytes = 1472;
// Where products are divided: each warpgroup's walk over items is a copy of its own, and is spilled
// around the loops over steps, which spill nothing without options (disassembled). 2,276 bytes with
// every option over packed sequences.
inline constexpr size_t kSm90DividedSpillBytes = 2304;
// backward_dq_sm90 with options: 912 bytes with every option at 256 dims, 140 at 64; not timed.
inline constexpr size_t kSm90DqSpillBytes = 1024;

// Counts and the order of a run, and where its parts of the workspace begin, in bytes. Counters: an
// item counter for each launch, at most kLaunches; done and freed (line); nonfinite (1 + line).
struct Sm90BackwardPlan {
  static constexpr i64 kLaunches = 2;

  BackwardSchedule schedule;
  i64 num_batch_kv_heads;
  i64 kv_rows;  // of a block of keys
  i64 num_kv_blocks;
  i64 num_conversion_blocks;
  i64 padded_rows_per_head;  // of what is kept per query row
  i64 num_rows;              // of all heads
  i64 num_split;             // items, as in BackwardParams
  i64 num_parts = 1;
  i64 part_bytes;    // of the sums of one part of each
  i64 zeroed_bytes;  // sums of dQ and counters
  i64 counters_at;
  i64 rows_at;
  i64 delta_at;
  i64 part_sums_at;
  i64 key_blocks_at;     // of the blocks of keys of sequences that differ
  i64 num_key_ranges;    // blocks of keys whose documents backward_dq_sm90 asks for
  i64 num_query_ranges;  // blocks of queries whose documents backward_preprocess_sm90 asks for
  i64 key_ranges_at;
  i64 query_ranges_at;
  i64 document_blocks_at;
  i64 workspace_bytes;

  i64 num_tiles() const { return num_batch_kv_heads * num_kv_blocks; }
};
Sm90BackwardPlan sm90_backward_plan(const Problem& problem, const Gpu& gpu);

}  // namespace fulmen
