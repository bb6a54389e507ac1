// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan of an implementation that is still five functions of a problem, each of which derives its
// config again. For sm90 and sm80 until they have plans of their own; then this file goes.
#pragma once

#include "gpu/gpu_plan.h"

namespace fulmen {

using gpu::leaves_out;

// What a run takes beside the arrays; as in GpuPlan.
struct GpuNeeds {
  Tile tile;
  size_t workspace_bytes = 0;
  size_t zeroed_bytes = 0;
  i64 alignment_bytes = 1;
};

}  // namespace fulmen

namespace fulmen::gpu {

template <auto kRefusal, auto kNeeds, auto kLaunches, auto kRun>
class FunctionPlan final : public GpuPlan {
 public:
  FunctionPlan(const Problem& problem, const Gpu& gpu) {
    const GpuNeeds needs = kNeeds(problem, gpu);
    tile = needs.tile;
    workspace_bytes = needs.workspace_bytes;
    zeroed_bytes = needs.zeroed_bytes;
    alignment_bytes = needs.alignment_bytes;
    launches = kLaunches(problem, gpu);
  }
  static PlanOrRefusal plan(const Problem& problem, const Gpu& gpu) {
    const std::string refusal = kRefusal(problem, gpu);
    if (!refusal.empty()) return refusal;
    return std::make_unique<FunctionPlan>(problem, gpu);
  }
  void run(const Call& call) const override { kRun(call); }
};

}  // namespace fulmen::gpu
