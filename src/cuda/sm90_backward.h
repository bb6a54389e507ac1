// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm90 implementation, from a problem to its two launches: what prepares,
// and the kernel that computes dq, dk and dv. Configs and sizes come from plan/sm90_backward.h.
#pragma once

#include <vector>

#include "cuda/implementations.h"
#include "kernels/backward_config.h"

namespace fulmen::cuda {

std::vector<KernelLaunch> sm90_backward_launches(const Problem& problem, const Gpu& gpu);
void sm90_backward_run(const Call& call);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> sm90_backward_specs();

}  // namespace fulmen::cuda
