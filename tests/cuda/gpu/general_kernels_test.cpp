// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels on a real GPU against the scalar oracle, over drawn problems. Skipped
// where there is no usable driver, device or NVRTC. FULMEN_TEST_SEEDS sets how many problems are
// drawn (200); FULMEN_TEST_TIMING=1 adds the speed of simt to the output.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "../../cpu/tiled_support.h"
#include "../kernels/expect_close.h"
#include "../kernels/planted.h"
#include "cpu/backend.h"
#include "cuda/fma_kernels.h"
#include "cuda/params.h"
#include "managed.h"

namespace fulmen::test {
namespace {

enum class Rung { kNaive, kSimt };

class GeneralKernels : public testing::TestWithParam<Rung> {
 protected:
  void SetUp() override {
    try {
      device_ = &cuda::device(0);
      cuda::nvrtc();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }

  std::vector<cuda::KernelLaunch> launches(const AttentionParams& p, Operation operation) const {
    const std::size_t shared = device_->facts().shared_bytes_per_block;
    const bool forward = operation == Operation::kForward;
    if (GetParam() == Rung::kNaive)
      return forward ? cuda::naive_forward(p) : cuda::naive_backward(p);
    return forward ? cuda::simt_forward(p, shared) : cuda::simt_backward(p, shared);
  }

  void run(const Request& request) const {
    const AttentionParams p = cuda::attention_params(validate(request, Pointers::kChecked));
    for (const cuda::KernelLaunch& launch : launches(p, request.operation)) {
      cuda::launch(cuda::prepare(*device_, launch.spec), {launch.num_blocks}, &p, nullptr);
    }
    synchronize();
  }

  void synchronize() const {
    const cuda::CurrentContext current(*device_);
    device_->driver().check(device_->driver()->cuCtxSynchronize(), "finish a test");
  }

  // Mean of ten launches after two to warm up.
  double seconds_of(const cuda::LoadedKernel& kernel, i64 num_blocks,
                    const AttentionParams& p) const {
    constexpr int kRuns = 10;
    double seconds = 0;
    for (int run = -2; run < kRuns; ++run) {
      const auto start = std::chrono::steady_clock::now();
      cuda::launch(kernel, {num_blocks}, &p, nullptr);
      synchronize();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (run >= 0) seconds += taken.count() / kRuns;
    }
    return seconds;
  }

  static unsigned num_seeds() {
    const char* text = std::getenv("FULMEN_TEST_SEEDS");
    return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 200;
  }

  const cuda::Device* device_ = nullptr;
};

TEST_P(GeneralKernels, ForwardAgreesWithTheOracle) {
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    RandomProblem random(seed);
    ManagedMemory memory(*device_);
    const Request expected = random.draw();
    const Request actual = memory.copy(expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(GeneralKernels, BackwardAgreesWithTheOracleAndItself) {
  for (unsigned seed = 0; seed < num_seeds(); ++seed) {
    RandomProblem random(seed);
    ManagedMemory memory(*device_);
    const Request forward = random.draw();
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const unsigned need = (seed % 31) | 1u << (seed % 3);
    const Request expected = to_backward(random, forward, need);
    const Request actual = memory.copy(expected);
    const Request again = memory.copy(expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    run(actual);
    run(again);
    const std::vector<Array> outputs = outputs_of(Operation::kBackward);
    expect_close(actual, expected, outputs, seed);
    for (const Array output : outputs) {
      if (!actual.arrays[output].present()) continue;
      EXPECT_EQ(compare(actual.arrays[output], again.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output) << " differs from run to run";
    }
  }
}

TEST_P(GeneralKernels, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    ManagedMemory memory(*device_);
    const Request expected = planted_request(random, dtype);
    const Request actual = memory.copy(expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual);
    expect_close(actual, expected, {Array::kO, Array::kLse}, 7);
    const Request gradients = to_backward(random, expected, 7);
    const Request others = memory.copy(gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    run(others);
    expect_close(others, gradients, {Array::kDQ, Array::kDK, Array::kDV}, 7);
  }
}

// Addresses that are no multiple of the element's size.
TEST_P(GeneralKernels, TakeAnyAlignment) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    RandomProblem random(seed);
    ManagedMemory memory(*device_);
    const Request expected = random.draw();
    Request actual = expected;
    for (Tensor& tensor : actual.arrays.tensors) tensor = memory.copy(tensor, 1 + seed % 3);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

// Batch times heads beyond 65,535, which would not fit two axes of a grid.
TEST_P(GeneralKernels, TakeManyHeads) {
  RandomProblem random(1);
  ManagedMemory memory(*device_);
  Request request;
  const i64 batch = 70000;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    request.arrays[array] = random.array(DType::kFloat32, {batch, 1, 1, 4});
    random.fill_normal(request.arrays[array]);
  }
  request.options.scale = kNan;
  const Request actual = memory.copy(request);
  run(actual);
  EXPECT_EQ(compare(actual.arrays[Array::kO], request.arrays[Array::kV]).largest, 0);  // one key
}

TEST_P(GeneralKernels, Timing) {
  if (std::getenv("FULMEN_TEST_TIMING") == nullptr) GTEST_SKIP() << "FULMEN_TEST_TIMING is not set";
  for (const auto& [rows, dim] : {std::pair<i64, i64>{4096, 64}, {4096, 128}, {2048, 256}}) {
    RandomProblem random(1);
    ManagedMemory memory(*device_);
    const i64 heads = 2048 / dim;
    Request request;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      Tensor tensor;
      tensor.dtype = DType::kFloat32;
      tensor.rank = 3;
      const i64 extent[3] = {heads, rows, dim};
      const i64 stride[3] = {rows * dim, dim, 1};
      std::copy(extent, extent + 3, tensor.shape);
      std::copy(stride, stride + 3, tensor.strides);
      tensor.data = memory.allocate(static_cast<std::size_t>(heads * rows * dim * 4));
      random.fill_normal(tensor);
      request.arrays[array] = tensor;
    }
    request.options.scale = kNan;
    const AttentionParams p = cuda::attention_params(validate(request, Pointers::kChecked));
    cuda::KernelLaunch launch = launches(p, Operation::kForward).at(0);
    for (launch.spec.min_blocks = 1; launch.spec.min_blocks <= 2; ++launch.spec.min_blocks) {
      const cuda::LoadedKernel& kernel = cuda::prepare(*device_, launch.spec);
      const double seconds = seconds_of(kernel, launch.num_blocks, p);
      const double flops = 4.0 * static_cast<double>(heads * rows * rows * dim);
      std::printf(
          "%s: %.3f ms, %.1f TFLOP/s, %d registers, %zu bytes spilled, %d blocks resident\n",
          launch.spec.name.c_str(), seconds * 1e3, flops / seconds * 1e-12, kernel.use.registers,
          kernel.use.spill_store_bytes, kernel.blocks_resident);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rungs, GeneralKernels, testing::Values(Rung::kNaive, Rung::kSimt),
                         [](const auto& info) {
                           return info.param == Rung::kNaive ? "naive" : "simt";
                         });

}  // namespace
}  // namespace fulmen::test
