// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The texts that the kernels of sm90's forward pass are compiled from. src/cuda/sm90_forward.cpp
// launches them.
#pragma once

#include <vector>

#include "cuda/source.h"
#include "kernels/config.h"

namespace fulmen::cuda {

KernelSpec sm90_forward_spec(const AttentionConfig& config);

// The kernel before it that finds the documents of each block of keys.
KernelSpec sm90_key_ranges_spec(const AttentionConfig& config);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> sm90_forward_specs();

}  // namespace fulmen::cuda
