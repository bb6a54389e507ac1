// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See tiled_support.h.

#include "tiled_support.h"

#include "cpu/backend.h"

namespace fulmen::test {

void run_tiled(RandomProblem& random, const Request& request, int num_threads) {
  CpuDevice device = cpu::cpu_device();
  device.num_threads = num_threads;
  const Plan plan = choose(validate(request, Pointers::kChecked), device);
  char* const workspace = static_cast<char*>(random.memory(plan.workspace_bytes + 1)) + 1;
  if (request.operation == Operation::kForward) {
    cpu::tiled_forward(plan, plan.problem, workspace);
  } else {
    cpu::tiled_backward(plan, plan.problem, workspace);
  }
}

std::vector<Array> outputs_of(Operation operation) {
  if (operation == Operation::kForward) return {Array::kO, Array::kLse, Array::kStats};
  std::vector<Array> all{Array::kDQ, Array::kDK, Array::kDV, Array::kDBias, Array::kDSinks};
  for (int index = 0; index < kNumCaptures; ++index) all.push_back(capture_gradient(index));
  return all;
}

Request with_fresh_outputs(RandomProblem& random, const Request& request) {
  Request fresh = request;
  for (const Array output : outputs_of(request.operation)) {
    fresh.arrays[output] = random.twin(request.arrays[output]);
  }
  return fresh;
}

}  // namespace fulmen::test
