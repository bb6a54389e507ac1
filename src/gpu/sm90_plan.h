// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm90 implementation as plans see it: Hopper's own kernels, forward and backward. Pure.
#pragma once

#include "gpu/function_plan.h"

namespace fulmen {

std::string sm90_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds sm90_needs(const Problem& problem, const Gpu& gpu);
u32 sm90_switches(const Problem& problem);

}  // namespace fulmen
