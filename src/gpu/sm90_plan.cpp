// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which pass answers.

#include "gpu/sm90_plan.h"

#include "gpu/backward_sm90/plan.h"
#include "gpu/forward_sm90/plan.h"

namespace fulmen {

std::string sm90_refusal(const Problem& problem, const Gpu& gpu) {
  if (problem.operation == Operation::kForward) return sm90_forward_refusal(problem, gpu);
  return sm90_backward_refusal(problem, gpu);
}

GpuNeeds sm90_needs(const Problem& problem, const Gpu& gpu) {
  if (problem.operation == Operation::kForward) return sm90_forward_needs(problem, gpu);
  return sm90_backward_needs(problem, gpu);
}

u32 sm90_switches(const Problem& problem) {
  return problem.operation == Operation::kForward ? sm90_forward_switches(problem)
                                                  : sm90_backward_switches(problem);
}

}  // namespace fulmen
