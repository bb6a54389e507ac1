// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which pass is launched. Plans refuse what is not here.

#include "gpu/sm90_run.h"

#include "gpu/backward_sm90/run.h"
#include "gpu/forward_sm90/run.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm90_launches(const Problem& problem, const Gpu& gpu) {
  if (problem.operation == Operation::kForward) return sm90_forward_launches(problem, gpu);
  return sm90_backward_launches(problem, gpu);
}

void sm90_run(const Call& call) {
  if (call.problem.operation == Operation::kForward) return sm90_forward_run(call);
  sm90_backward_run(call);
}

}  // namespace fulmen::gpu
