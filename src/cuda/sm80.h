// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm80 implementation as the run time sees it: specs of its kernels, launches, runs.
#pragma once

#include <vector>

#include "cuda/implementations.h"
#include "kernels/sm80_config.h"

namespace fulmen::cuda {

// For the table of implementations.h.
std::vector<KernelLaunch> sm80_launches(const Problem& problem, const Gpu& gpu);
void sm80_run(const Call& call);

KernelSpec sm80_forward_spec(const Sm80Config& config);

}  // namespace fulmen::cuda
