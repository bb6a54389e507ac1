// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The texts that the Hopper backward's kernels are compiled from, one function for each kernel.
// src/gpu/backward_sm90/plan.cpp says which a plan launches.
#pragma once

#include <vector>

#include "gpu/jit/kernel_spec.h"
#include "kernels/backward_sm90/config.h"
#include "kernels/dq_sm90/config.h"

namespace fulmen::gpu {

KernelSpec backward_preprocess_spec(const BackwardPreprocessConfig& config);
KernelSpec backward_sm90_spec(const BackwardSm90Config& config);
KernelSpec backward_dq_spec(const ForwardSm90Config& config);
KernelSpec backward_fallback_spec(const BackwardFallbackConfig& config);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> backward_sm90_specs();

}  // namespace fulmen::gpu
