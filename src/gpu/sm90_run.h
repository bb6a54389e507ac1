// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm90 implementation as the run time sees it; for the table of implementations.h.
#pragma once

#include <vector>

#include "gpu/call.h"
#include "gpu/gpu_plan.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm90_launches(const Problem& problem, const Gpu& gpu);
void sm90_run(const Call& call);

}  // namespace fulmen::gpu
