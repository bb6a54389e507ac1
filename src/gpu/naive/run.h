// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive implementation as the run time sees it: one thread a row, every problem. The oracle on
// a GPU.
#pragma once

#include <vector>

#include "gpu/implementations.h"
#include "kernels/params.h"

namespace fulmen::gpu {

// For the table of implementations.h; fma_run launches them.
std::vector<KernelLaunch> naive_launches(const Problem& problem, const Gpu& gpu);

// What a call launches, in order: for backward, a kernel for each gradient that is present (dK and
// dV share one).
std::vector<KernelLaunch> naive_forward(const AttentionParams& params);
std::vector<KernelLaunch> naive_backward(const AttentionParams& params);

// What CI compiles for every architecture: for each entry, a spec of each dtype.
std::vector<std::vector<KernelSpec>> naive_specs();

}  // namespace fulmen::gpu
