// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm80 implementation as plans see it: mma.sync kernels for Ampere and later, forward, every
// option of the library for 16-bit inputs, and for float32 where precision permits. Which tile a
// head dimension gets on a card is decided here; src/gpu/forward_sm80/run.cpp compiles and launches
// it. Pure.
#pragma once

#include "gpu/function_plan.h"
#include "kernels/forward_sm80/config.h"

namespace fulmen {

std::string sm80_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds sm80_needs(const Problem& problem, const Gpu& gpu);
u32 sm80_switches(const Problem& problem);

// Called only where nothing is refused.
ForwardSm80Config sm80_forward_config(const Problem& problem, const Gpu& gpu);

// Whether rows of q, k, v and `last` are 16-byte units on multiples of 16 bytes, and all of the
// dtype of q.
bool sm80_has_aligned_rows(const Problem& problem, Array last = Array::kO);

// Whether rows of mask and bias, where there are any, are 16-byte units on multiples of 16 bytes.
bool sm80_has_aligned_pairs(const Problem& problem);

// Lines (heads of batch entries) whose blocks are neighbours in a launch, the longest first: their
// K and V take half of the L2; under a causal mask they also keep the card busy for a while, so
// that the last group does not begin when the others are done.
i32 sm80_forward_heads_per_group(const Problem& problem, const Gpu& gpu,
                                 const ForwardSm80Config& config);

}  // namespace fulmen
