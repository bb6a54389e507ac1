// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend's one entry: what the host can see of lengths is checked before a byte is
// written, then the planned implementation runs.

#include "cpu/backend.h"

#include "core/request.h"
#include "core/validate.h"

namespace fulmen::cpu {
namespace {

PlanCache<Plan>& plan_cache() {
  static PlanCache<Plan> cache;
  return cache;
}

void run_planned(const Plan& plan, const Problem& problem, void* workspace) {
  const bool forward = problem.operation == Operation::kForward;
  if (plan.implementation == Implementation::kScalar) {
    forward ? scalar_forward(problem) : scalar_backward(problem);
  } else {
    forward ? tiled_forward(plan, problem, workspace) : tiled_backward(plan, problem, workspace);
  }
}

}  // namespace

std::shared_ptr<const Plan> plan_of(const Request& request) {
  const CpuDevice device = cpu_device();
  const RequestKey key(request, device.num_threads);
  if (request.options.device_name == nullptr) {
    if (auto plan = plan_cache().find(key)) return plan;
  }
  auto plan = std::make_shared<const Plan>(choose(validate(request, Pointers::kChecked), device));
  plan_cache().insert(key, plan);
  return plan;
}

void run(const Plan& plan, const Problem& problem, void* workspace) {
  check_lengths(problem);
  if (!problem.has(Array::kRng)) return run_planned(plan, problem, workspace);
  Problem drawn = problem;
  read_rng(drawn);
  run_planned(plan, drawn, workspace);
}

}  // namespace fulmen::cpu
