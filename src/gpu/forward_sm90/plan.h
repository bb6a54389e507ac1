// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the sm90 implementation as plans see it: what it refuses, and which config of
// kernels/forward_sm90/forward_sm90.cuh a problem gets. src/gpu/forward_sm90/run.cpp compiles and
// launches it. Pure.
#pragma once

#include "gpu/function_plan.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

std::string sm90_forward_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds sm90_forward_needs(const Problem& problem, const Gpu& gpu);
u32 sm90_forward_switches(const Problem& problem);  // of Optimisation

// Why the copy engine cannot read or write an array; "" when it can.
std::string sm90_layout_refusal(const Problem& problem, Array array);

// Whether blocks of queries are dealt out by a counter at the workspace's begin: not where the
// multiprocessors take all of them at once.
bool sm90_counts_blocks(const Problem& problem, const Gpu& gpu, const ForwardSm90Config& config);

// Where in the workspace the documents of each block of keys lie, and how many of them.
inline constexpr size_t kKeyRangesOffset = 16;
size_t sm90_num_key_ranges(const Problem& problem, const ForwardSm90Config& config);

// Called only where nothing is refused.
ForwardSm90Config sm90_forward_config(const Problem& problem);

// Heads whose query blocks are handed out together, so that their keys and values stay in the L2.
i32 sm90_heads_per_group(const Problem& problem, const Gpu& gpu);

// Query blocks of a run at most, over all heads and sequences.
i64 sm90_max_q_blocks(const Problem& problem, const ForwardSm90Config& config);

}  // namespace fulmen
