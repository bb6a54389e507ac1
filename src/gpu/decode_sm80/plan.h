// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of few query rows over long keys, a form of the sm80 implementation: keys are
// divided among all multiprocessors. Which problems it is for, and its tiles, are decided here.
// Pure.
#pragma once

#include <vector>

#include "gpu/gpu_plan.h"
#include "kernels/decode_sm80/config.h"

namespace fulmen::gpu {

// Whether decode_sm80 takes a problem and is the fastest kernel for it.
bool prefers_decode_sm80(const Problem& problem, const Gpu& gpu);

// Of such a problem.
PlanOrRefusal plan_decode_sm80(const Problem& problem, const Gpu& gpu);

// The same beside a kernel that has the requests of more than kFewRows rows of a group: on so many
// multiprocessors where there may be such, else on all. The kernel launched next must not wait for
// it before its own end.
std::unique_ptr<GpuPlan> plan_decode_beside(const Problem& problem, const Gpu& gpu,
                                            int multiprocessors);

// Whether more than kv_lengths and page_table says where sequences are.
bool is_ragged(const Problem& problem);

// Whether a sequence has one query row, level with its last key: causal hides nothing of it.
inline bool is_last_row(const Problem& problem) {
  return problem.max_q == 1 && !problem.has(Array::kPositions) && !problem.has(Array::kQLengths) &&
         !problem.packed.q && problem.alignment == Alignment::kBottomRight;
}

// Whether rows of o are 16-byte vectors.
bool has_aligned_o(const Problem& problem);

// What plan_decode_sm80 compiles for.
DecodeSm80Config decode_sm80_config(const Problem& problem, const Gpu& gpu);

// What tiles and a launch both count.

// Query rows of a head of k and v.
inline i64 decode_rows(const Problem& problem) { return problem.max_q * problem.group_size(); }

// Heads of k and v, by those that are in a row tile together.
inline i64 head_tiles(const Problem& problem, const DecodeSm80Config& config) {
  return problem.heads_kv / config.heads;
}
// Row tiles, but for those behind the first of a group of heads.
inline i64 heads_of_sequences(const Problem& problem, const DecodeSm80Config& config) {
  return problem.num_sequences * head_tiles(problem, config);
}

inline i64 decode_row_tiles(const Problem& problem, const DecodeSm80Config& config) {
  return ceil_div(decode_rows(problem) * config.heads, config.rows());
}

// Clusters that a card holds at once: an H200 66 of 2, 30 of 4, 15 of 8.
inline i64 clusters_at_once(const Gpu& gpu, i64 size) {
  return gpu.num_multiprocessors * (size <= 2 ? 11 : 10) / 11 / size;
}

// One kernel for each set of options, each for several head dimensions, in both dtypes: what CI
// compiles.
std::vector<std::vector<KernelSpec>> decode_sm80_specs(const Gpu& gpu);

}  // namespace fulmen::gpu
