// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm80 implementation as the run time sees it: specs of its kernels, launches, runs.
#pragma once

#include <vector>

#include "gpu/call.h"
#include "gpu/gpu_plan.h"
#include "kernels/forward_sm80/config.h"

namespace fulmen::gpu {

// For the table of implementations.h.
std::vector<KernelLaunch> sm80_launches(const Problem& problem, const Gpu& gpu);
void sm80_run(const Call& call);

KernelSpec sm80_forward_spec(const ForwardSm80Config& config);

// One kernel for each set of options, each in the tiles of a card for several head dimensions, in
// both dtypes.
std::vector<std::vector<KernelSpec>> sm80_specs(const Gpu& gpu);

}  // namespace fulmen::gpu
