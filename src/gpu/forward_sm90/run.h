// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the sm90 implementation, from a problem to a launch: tensor maps and params.
// Configs come from gpu/forward_sm90/plan.h, texts of kernels from gpu/forward_sm90/specs.h.
#pragma once

#include <vector>

#include "gpu/call.h"
#include "gpu/driver/launch.h"
#include "gpu/gpu_plan.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm90_forward_launches(const Problem& problem, const Gpu& gpu);
void sm90_forward_run(const Call& call);

// Everything but the tensor maps. next_block: one word of the workspace.
ForwardParams sm90_forward_params(const Problem& problem, const Gpu& gpu,
                                  const ForwardSm90Config& config, u32* next_block, u32* faults);

struct ForwardBoxes {
  TensorBox q, k, v, o;
};
ForwardBoxes sm90_forward_boxes(const Arrays& arrays, const ForwardSm90Config& config);

}  // namespace fulmen::gpu
