// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm80 implementation, from a problem to its launches: what prepares, the
// kernel that computes dq, dk and dv, what finishes, and simt's kernels for dbias and dsinks.
// Configs and sizes come from gpu/backward_sm80/plan.h.
#pragma once

#include <vector>

#include "gpu/call.h"
#include "gpu/gpu_plan.h"
#include "kernels/backward_sm80/config.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm80_backward_launches(const Problem& problem, const Gpu& gpu);
void sm80_backward_run(const Call& call);

// Kernels that CI compiles, for several head dimensions in the tiles of a card and both dtypes: the
// main one for several sets of gradients, then of options; then those before and after it.
std::vector<std::vector<KernelSpec>> sm80_backward_specs(const Gpu& gpu);

}  // namespace fulmen::gpu
