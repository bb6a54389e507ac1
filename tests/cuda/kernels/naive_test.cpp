// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive kernels' own text, compiled for the host, against the scalar oracle over drawn
// problems.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cuda/fma_kernels.h"
#include "kernel_support.h"
#include "kernels/backward_naive.cuh"
#include "planted.h"

namespace fulmen::test {
namespace {

template <DType kDType>
constexpr FmaConfig config_of() {
  FmaConfig config;
  config.dtype = kDType;
  return config;
}

template <DType kDType>
struct NaiveForward {
  static void run(const AttentionParams& p) {
    run_kernel(cuda::naive_forward(p).at(0), [&] { forward_naive<config_of<kDType>()>(p); });
  }
};

template <DType kDType>
struct NaiveBackward {
  static void run(const AttentionParams& p) {
    constexpr FmaConfig kConfig = config_of<kDType>();
    for (const cuda::KernelLaunch& launch : cuda::naive_backward(p)) {
      const std::string& entry = launch.spec.function;
      if (entry == "fulmen::backward_naive_dq") {
        run_kernel(launch, [&] { backward_naive_dq<kConfig>(p); });
      } else if (entry == "fulmen::backward_naive_dkdv") {
        run_kernel(launch, [&] { backward_naive_dkdv<kConfig>(p); });
      } else if (entry == "fulmen::backward_naive_dbias") {
        run_kernel(launch, [&] { backward_naive_dbias<kConfig>(p); });
      } else {
        run_kernel(launch, [&] { backward_naive_dsinks<kConfig>(p); });
      }
    }
  }
};

class Naive : public testing::TestWithParam<unsigned> {};

TEST_P(Naive, ForwardAgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + 25; ++seed) {
    RandomProblem random(seed);
    const Request expected = random.draw();
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    for_dtype<NaiveForward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(Naive, BackwardAgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + 25; ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const unsigned need = (seed % 31) | 1u << (seed % 3);  // at least one that is always there
    const Request expected = to_backward(random, forward, need);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    for_dtype<NaiveBackward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
  }
}

TEST(NaivePlanted, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request expected = planted_request(random, dtype);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    for_dtype<NaiveForward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, {Array::kO, Array::kLse}, 7);

    const Request gradients = to_backward(random, expected, 7);
    const Request others = with_fresh_outputs(random, gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    for_dtype<NaiveBackward>(cuda::attention_params(validate(others, Pointers::kChecked)));
    expect_close(others, gradients, outputs_of(Operation::kBackward), 7);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, Naive, testing::Range(0u, 100u, 25u));

}  // namespace
}  // namespace fulmen::test
