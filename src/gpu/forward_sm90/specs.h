// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The texts that the kernels of sm90's forward pass are compiled from.
// src/gpu/forward_sm90/plan.cpp says which a plan launches.
#pragma once

#include <vector>

#include "gpu/jit/kernel_spec.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

KernelSpec forward_sm90_spec(const ForwardSm90Config& config);

// The kernel before it that finds the documents of each block of keys.
KernelSpec sm90_key_ranges_spec(const ForwardSm90Config& config);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> forward_sm90_specs();

}  // namespace fulmen::gpu
