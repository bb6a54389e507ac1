// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan whose kernels are compiled, and loaded where its device is here: what a run needs, so that
// it only fills parameters and launches.
#pragma once

#include "gpu/implementations.h"
#include "gpu/jit/bundle.h"
#include "plan/plan.h"

namespace fulmen::gpu {

struct PreparedPlan {
  Plan plan;
  const Device* device = nullptr;  // null: the plan is for a GPU that is not here
  std::size_t zeroed_bytes = 0;    // as in GpuNeeds
  i64 alignment_bytes = 1;         // likewise
  const Runner* runner = nullptr;
  std::vector<PreparedKernel> kernels;  // empty where there is no device
  GpuReport report;
};

// The first implementation that takes the problem and whose kernels compile as they must. Throws
// Error: kUnsupported with every reason when there is none, and what compiling and loading throw.
PreparedPlan prepare_plan(const Problem& problem, const Device& device);

// Likewise for a GPU that is not here. Where there is no compiler, or none for its architecture,
// the plan says so in a note.
PreparedPlan prepare_plan(const Problem& problem, const Gpu& gpu);

// The plan as JSON, with what there is to say of the cache.
std::string explain(const PreparedPlan& prepared);

// The machine code of a plan, for a bundle.
std::vector<BundleEntry> bundle_entries(const PreparedPlan& prepared);

}  // namespace fulmen::gpu
