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

// One kernel for each set of options, each for several head dimensions, in both dtypes: what CI
// compiles.
std::vector<std::vector<KernelSpec>> decode_sm80_specs(const Gpu& gpu);

}  // namespace fulmen::gpu
