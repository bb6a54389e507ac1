// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of a backward pass of sm80 from the config of its main kernel. Pure.
#pragma once

#include "core/problem.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/backward_sm80/config.h"

namespace fulmen::gpu {

KernelSpec backward_sm80_spec(const BackwardSm80Config& config);

// The others are compiled for those parts of the config that they depend on.
KernelSpec backward_preprocess_sm80_spec(const Problem& problem, const BackwardSm80Config& config);
KernelSpec backward_postprocess_sm80_spec(const BackwardSm80Config& config);
KernelSpec backward_dbias_sm80_spec(const BackwardSm80Config& config);

}  // namespace fulmen::gpu
