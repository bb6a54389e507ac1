// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The implementations on GPUs: one table, which says of each how it plans a pass. A new
// implementation is a row of it.
#pragma once

#include <span>

#include "gpu/gpu_plan.h"

namespace fulmen::gpu {

// One implementation's forward or backward.
struct Pass {
  // Called once where the implementation is tried, with pointers that may be unknown.
  PlanOrRefusal (*plan)(const Problem& problem, const Gpu& gpu);
  // The optimisations that its kernels for a problem can be made without; null: none. Called only
  // for a problem that leaves some out.
  u32 (*switches)(const Problem& problem, const Gpu& gpu) = nullptr;
  bool chooses_tiles = false;  // a problem may name a tile that is not the table's
};

struct GpuImplementation {
  Implementation implementation;
  const char* merit;          // one clause
  bool tensor_cores = false;  // its products run on them
  Pass forward;
  Pass backward;
};

// In order of preference.
std::span<const GpuImplementation> gpu_implementations();

const GpuImplementation& gpu_implementation(Implementation implementation);

// The plan of one implementation, or why it is not used: another one was asked for, it refuses the
// problem, has no switch for an optimisation, no choice of tiles, or needs aligned pointers.
PlanOrRefusal plan_with(const GpuImplementation& row, const Problem& problem, const Gpu& gpu);

}  // namespace fulmen::gpu
