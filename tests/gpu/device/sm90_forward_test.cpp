// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper forward on a real GPU against the scalar oracle, over drawn problems: as a plan would
// choose its config and as a run would launch it, twice, to the same bits. Skipped where there is
// no Hopper. FULMEN_TEST_SEEDS sets how many problems are drawn (200).
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <thread>

#include "../kernels/expect_close.h"
#include "../kernels/hopper_request.h"
#include "cpu/backend.h"
#include "device_memory.h"
#include "gpu/call.h"
#include "gpu/forward_sm90/plan.h"

namespace fulmen::test {
namespace {

// What a drawn request shall have. Few enough that all of them compile in a minute.
ForwardSm90Config drawn_options(RandomProblem& random, unsigned seed) {
  constexpr i32 kDims[][2] = {{64, 64}, {128, 128}, {96, 80}, {256, 256}, {192, 128}, {64, 192}};
  ForwardSm90Config config;
  config.dtype = random.one_of({DType::kBFloat16, DType::kFloat16});
  config.d_qk = kDims[seed % 6][0];
  config.d_v = kDims[seed % 6][1];
  config.score.mask_kind = random.one_of({MaskKind::kNone, MaskKind::kRight, MaskKind::kBoth});
  switch (seed / 6 % 8) {
    case 0:
      break;
    case 1:
    case 2:
      config.score.varlen = config.score.stats = true;
      break;
    case 3:
      config.score.negative_scale = config.score.fp32_out = config.score.sinks = true;
      break;
    case 4:
      config.score.score_mod = config.score.stats = config.score.varlen = true;
      break;
    case 5:
      config.score.alibi = config.score.sinks = config.score.varlen = true;
      break;
    case 6:
      config.score.bias = DType::kFloat32;
      config.score.mask = config.score.stats = true;
      break;
    default:
      config.score.documents = config.score.dropout = config.score.varlen = true;
  }
  return config;
}

class Sm90Forward : public testing::Test {
 protected:
  void SetUp() override {
    const FoundDevice found = find_device();
    if (found.device == nullptr) GTEST_SKIP() << found.reason;
    device_ = found.device;
    if (device_->facts().compute_capability != 90) GTEST_SKIP() << "no Hopper";
  }

  // Compiles the kernels of all requests on all cores, before they are needed one by one.
  void prepare_all(const std::vector<Request>& requests) const {
    std::map<std::string, gpu::KernelSpec> specs;
    for (const Request& request : requests) {
      const Problem problem = validate(request, Pointers::kChecked);
      const auto made = gpu::plan_forward_sm90(problem, device_->facts());
      ASSERT_EQ(made.refusal, "");
      const auto& launches = made.plan->launches;
      specs.emplace(launches[0].spec.name, launches[0].spec);
    }
    std::vector<const gpu::KernelSpec*> order;
    for (const auto& [name, spec] : specs) order.push_back(&spec);
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      threads.emplace_back([&] {
        for (std::size_t at = next++; at < order.size(); at = next++) {
          try {
            gpu::prepare(*device_, *order[at]);
          } catch (const Error& error) {
            ADD_FAILURE() << order[at]->name << ": " << error.what();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void run(const Request& request, DeviceMemory& memory) const {
    const Problem problem = validate(request, Pointers::kChecked);
    const auto made = gpu::plan_forward_sm90(problem, device_->facts());
    const auto& launches = made.plan->launches;
    const gpu::PreparedKernel kernel{&gpu::prepare(*device_, launches[0].spec),
                                     launches[0].shape()};
    i64 zeros[2] = {};
    Tensor workspace;
    workspace.data = zeros;
    workspace.dtype = DType::kInt64;
    workspace.rank = 1;
    workspace.shape[0] = 2;
    workspace.strides[0] = 1;
    const Tensor on_device = memory.copy(workspace);
    const gpu::CurrentContext current(*device_);
    made.plan->run({problem,
                    device_->driver(),
                    {&kernel, 1},
                    static_cast<char*>(on_device.data),
                    nullptr,
                    nullptr});
    EXPECT_EQ(memory.fetch(on_device).index(0, 0, 0, 0), 0) << "the next launch begins elsewhere";
  }

  static unsigned num_seeds() {
    const char* text = std::getenv("FULMEN_TEST_SEEDS");
    return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 200;
  }

  void expect_agreement(const std::vector<Request>& requests) const {
    prepare_all(requests);
    if (HasFatalFailure()) return;
    for (unsigned seed = 0; seed < requests.size(); ++seed) {
      DeviceMemory memory(*device_);
      const Request& expected = requests[seed];
      const Request first = memory.copy(expected);
      const Request second = memory.copy(expected);
      cpu::scalar_forward(validate(expected, Pointers::kChecked));
      run(first, memory);
      run(second, memory);
      const Request actual = memory.fetch(first);
      const Request again = memory.fetch(second);
      const DType dtype = expected.arrays[Array::kQ].dtype;
      const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
      EXPECT_LE(o.largest, tolerance(dtype, dtype) * max(o.magnitude, 1.0)) << "seed " << seed;
      expect_close(actual, expected, {Array::kLse}, seed);
      for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
        if (!actual.arrays[output].present()) continue;
        EXPECT_EQ(compare(actual.arrays[output], again.arrays[output]).largest, 0)
            << "seed " << seed << ", " << name(output) << " differs from run to run";
      }
    }
  }

  const gpu::Device* device_ = nullptr;
};

TEST_F(Sm90Forward, AgreesWithTheOracleAndItself) {
  std::vector<std::unique_ptr<RandomProblem>> owners;
  std::vector<Request> requests;
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    owners.push_back(std::make_unique<RandomProblem>(seed));
    RandomProblem& random = *owners.back();
    const ForwardSm90Config options = drawn_options(random, seed);
    requests.push_back(HopperRequest(random, options, seed % 10 == 0 ? 1500 : 400).request);
  }
  expect_agreement(requests);
}

// Keys and values that are NaN or infinite, seen by some rows of a block and hidden from others.
TEST_F(Sm90Forward, WhatIsHiddenDoesNotShow) {
  std::vector<std::unique_ptr<RandomProblem>> owners;
  std::vector<Request> requests;
  for (unsigned seed = 0; seed < num_seeds() / 4; ++seed) {
    owners.push_back(std::make_unique<RandomProblem>(seed));
    RandomProblem& random = *owners.back();
    ForwardSm90Config options = drawn_options(random, seed);
    options.score.mask_kind = MaskKind::kBoth;
    requests.push_back(HopperRequest(random, options, 400).request);
    plant_unusual(requests.back(), random);
  }
  expect_agreement(requests);
}

}  // namespace
}  // namespace fulmen::test
