// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The general kernels by name: which text, which config, how many blocks. naive and simt take every
// problem; they differ in speed.
#pragma once

#include <vector>

#include "cuda/launch.h"
#include "kernels/params.h"

namespace fulmen::cuda {

// One kernel and how many blocks a call needs of it.
struct KernelLaunch {
  KernelSpec spec;
  i64 num_blocks;
};

// What a forward or backward call launches, in order, on the naive implementation: for backward, one
// kernel for each gradient that is present (dK and dV share one).
std::vector<KernelLaunch> naive_forward(const AttentionParams& params);
std::vector<KernelLaunch> naive_backward(const AttentionParams& params);

// Every kernel of the naive implementation: for each entry, its specs for the four dtypes.
std::vector<std::vector<KernelSpec>> naive_specs();

}  // namespace fulmen::cuda
