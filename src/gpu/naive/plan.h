// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive implementation: one thread a row, every problem. The oracle on a GPU. Pure.
#pragma once

#include "gpu/gpu_plan.h"
#include "kernels/params.h"

namespace fulmen::gpu {

PlanOrRefusal plan_naive(const Problem& problem, const Gpu& gpu);

// The kernels of a pass, in order: for backward, one for each gradient that is present (dK and dV
// share one).
std::vector<KernelLaunch> naive_forward(const AttentionParams& params);
std::vector<KernelLaunch> naive_backward(const AttentionParams& params);

// What CI compiles for every architecture: for each entry, a spec of each dtype.
std::vector<std::vector<KernelSpec>> naive_specs();

}  // namespace fulmen::gpu
