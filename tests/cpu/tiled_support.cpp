// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See tiled_support.h.

#include "tiled_support.h"

#include <cstring>

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

namespace {

// (1, heads, rows, dim) with heads inside a row.
Tensor heads_inside(RandomProblem& random, DType dtype, i64 heads, i64 rows, i64 dim) {
  Tensor tensor = random.contiguous(dtype, {1, rows, heads, dim});
  random.fill_normal(tensor);
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
  return tensor;
}

Tensor heads_from(Tensor tensor, i64 first, i64 count) {
  tensor.data = tensor.address(0, first, 0, 0);
  tensor.shape[1] = count;
  return tensor;
}

}  // namespace

bool has_bits_of_heads_alone(DType dtype, i64 group,
                             const std::function<void(RandomProblem&, const Request&)>& run) {
  constexpr i64 kHeads = 5, kKeys = 2100, kDim = 64;
  RandomProblem random(7);
  Request all;
  all.arrays[Array::kQ] = heads_inside(random, dtype, kHeads * group, 1, kDim);
  all.arrays[Array::kK] = heads_inside(random, dtype, kHeads, kKeys, kDim);
  all.arrays[Array::kV] = heads_inside(random, dtype, kHeads, kKeys, kDim);
  all.arrays[Array::kO] = random.contiguous(DType::kFloat32, {1, kHeads * group, 1, kDim});
  all.arrays[Array::kK].set_real(0, 1, 1500, 3, 0x1p-130);
  all.arrays[Array::kV].set_real(0, 3, 40, 5, HUGE_VAL);
  run(random, all);
  const Tensor expected = random.contiguous(DType::kFloat32, {1, kHeads * group, 1, kDim});
  for (i64 head = 0; head < kHeads; ++head) {
    Request alone = all;
    alone.arrays[Array::kO] = expected;
    for (const Array array : {Array::kQ, Array::kO}) {
      alone.arrays[array] = heads_from(alone.arrays[array], head * group, group);
    }
    for (const Array array : {Array::kK, Array::kV}) {
      alone.arrays[array] = heads_from(alone.arrays[array], head, 1);
    }
    run(random, alone);
  }
  const size_t bytes = static_cast<size_t>(kHeads * group * kDim) * sizeof(float);
  return std::memcmp(all.arrays[Array::kO].data, expected.data, bytes) == 0;
}

}  // namespace fulmen::test
