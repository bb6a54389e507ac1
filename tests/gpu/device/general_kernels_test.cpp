// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels on a real GPU against the scalar oracle, over drawn problems. Skipped
// where there is no usable driver, device or NVRTC. FULMEN_TEST_SEEDS sets how many problems are
// drawn (200).
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <thread>

#include "../../cpu/tiled_support.h"
#include "../kernels/expect_close.h"
#include "../kernels/planted.h"
#include "cpu/backend.h"
#include "device_memory.h"
#include "gpu/driver/launch.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"

namespace fulmen::test {
namespace {

enum class Rung { kNaive, kSimt, kSimtAddsDq };

class GeneralKernels : public testing::TestWithParam<Rung> {
 protected:
  void SetUp() override {
    const FoundDevice found = find_device();
    if (found.device == nullptr) GTEST_SKIP() << found.reason;
    device_ = found.device;
  }

  std::vector<gpu::KernelLaunch> launches(const Problem& problem) const {
    const AttentionParams p = gpu::attention_params(problem);
    const std::size_t shared = device_->facts().shared_bytes_per_block;
    const bool forward = problem.operation == Operation::kForward;
    if (GetParam() == Rung::kNaive) {
      return forward ? gpu::naive_forward(p) : gpu::naive_backward(p);
    }
    const bool adds_dq = GetParam() == Rung::kSimtAddsDq && gpu::simt_adds_dq(problem);
    return forward ? gpu::simt_forward(p, shared) : gpu::simt_backward(p, shared, adds_dq);
  }

  void run(const Request& request, DeviceMemory& memory) const {
    const Problem problem = validate(request, Pointers::kChecked);
    AttentionParams p = gpu::attention_params(problem);
    const i64 rows = p.batch_extent() * p.heads_q * p.q_rows;
    gpu::set_row_terms(p, memory.allocate(gpu::simt_workspace_bytes(p.q.dtype, rows)));
    for (const gpu::KernelLaunch& launch : launches(problem)) {
      gpu::launch(gpu::prepare(*device_, launch.spec), {launch.num_blocks}, &p, nullptr);
    }
    synchronize();
  }

  static unsigned need_of(unsigned seed) { return (seed % 31) | 1u << (seed % 3); }

  // Compiles every kernel of the drawn problems on all cores, before they are needed one by one.
  // draw(random, seed): a problem.
  template <class Draw>
  void prepare_all(const Draw& draw) const {
    std::map<std::string, gpu::KernelSpec> specs;
    for (unsigned seed = 0; seed < num_seeds(); ++seed) {
      RandomProblem random(seed);
      const Request request = draw(random, seed);
      for (const gpu::KernelLaunch& launch : launches(validate(request, Pointers::kChecked))) {
        specs.emplace(launch.spec.name, launch.spec);
      }
    }
    std::vector<std::thread> threads;
    std::atomic<std::size_t> next{0};
    std::vector<const gpu::KernelSpec*> order;
    for (const auto& [name, spec] : specs) order.push_back(&spec);
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      threads.emplace_back([&] {
        for (std::size_t at = next++; at < order.size(); at = next++) {
          gpu::prepare(*device_, *order[at]);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void synchronize() const {
    const gpu::CurrentContext current(*device_);
    device_->driver().check(device_->driver()->cuCtxSynchronize(), "finish a test");
  }

  static unsigned num_seeds() {
    const char* text = std::getenv("FULMEN_TEST_SEEDS");
    return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 200;
  }

  const gpu::Device* device_ = nullptr;
};

TEST_P(GeneralKernels, ForwardAgreesWithTheOracle) {
  prepare_all([](RandomProblem& random, unsigned) { return random.draw(); });
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    RandomProblem random(seed);
    DeviceMemory memory(*device_);
    const Request expected = random.draw();
    const Request actual = memory.copy(expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, memory);
    expect_close(memory.fetch(actual), expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(GeneralKernels, CachesAgreeWithTheOracle) {
  prepare_all([](RandomProblem& random, unsigned) { return random.draw_cache(); });
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    RandomProblem random(seed);
    DeviceMemory memory(*device_);
    const Request expected = random.draw_cache();
    const Request actual = memory.copy(expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, memory);
    expect_close(memory.fetch(actual), expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(GeneralKernels, BackwardAgreesWithTheOracleAndItself) {
  prepare_all([](RandomProblem& random, unsigned seed) {
    return to_backward(random, random.draw(), need_of(seed));
  });
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    RandomProblem random(seed);
    DeviceMemory memory(*device_);
    const Request forward = random.draw();
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, need_of(seed));
    const Request on_device = memory.copy(expected);
    const Request on_device_too = memory.copy(expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    run(on_device, memory);
    run(on_device_too, memory);
    const Request actual = memory.fetch(on_device);
    const Request again = memory.fetch(on_device_too);
    const std::vector<Array> outputs = outputs_of(Operation::kBackward);
    expect_close(actual, expected, outputs, seed);
    for (const Array output : outputs) {
      if (!actual.arrays[output].present()) continue;
      if (output == Array::kDQ && GetParam() == Rung::kSimtAddsDq) continue;  // in any order
      EXPECT_EQ(compare(actual.arrays[output], again.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output) << " differs from run to run";
    }
  }
}

TEST_P(GeneralKernels, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    DeviceMemory memory(*device_);
    const Request expected = planted_request(random, dtype);
    const Request actual = memory.copy(expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, memory);
    expect_close(memory.fetch(actual), expected, {Array::kO, Array::kLse}, 7);
    const Request gradients = to_backward(random, expected, 7);
    const Request others = memory.copy(gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    run(others, memory);
    expect_close(memory.fetch(others), gradients, {Array::kDQ, Array::kDK, Array::kDV}, 7);
  }
}

// Addresses that are no multiple of the element's size.
TEST_P(GeneralKernels, TakeAnyAlignment) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    RandomProblem random(seed);
    DeviceMemory memory(*device_);
    const Request expected = random.draw();
    const Request actual = memory.copy(expected, 1 + seed % 3);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, memory);
    expect_close(memory.fetch(actual), expected, {Array::kO, Array::kLse}, seed);
  }
}

// Batch times heads beyond 65,535, which would not fit two axes of a grid.
TEST_P(GeneralKernels, TakeManyHeads) {
  RandomProblem random(1);
  DeviceMemory memory(*device_);
  Request request;
  const i64 batch = 70000;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    request.arrays[array] = random.array(DType::kFloat32, {batch, 1, 1, 4});
    random.fill_normal(request.arrays[array]);
  }
  request.options.scale = kNan;
  const Request actual = memory.copy(request);
  run(actual, memory);
  EXPECT_EQ(compare(memory.fetch(actual.arrays[Array::kO]), request.arrays[Array::kV]).largest,
            0);  // one key
}

std::string name_of(const testing::TestParamInfo<Rung>& info) {
  if (info.param == Rung::kNaive) return "naive";
  return info.param == Rung::kSimt ? "simt" : "simt_adds_dq";
}

INSTANTIATE_TEST_SUITE_P(Rungs, GeneralKernels,
                         testing::Values(Rung::kNaive, Rung::kSimt, Rung::kSimtAddsDq), name_of);

}  // namespace
}  // namespace fulmen::test
