// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive kernels' own text, compiled for the host, against the scalar oracle over drawn problems.
#include "kernels/backward_naive.cuh"

#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cuda/fma_kernels.h"
#include "kernel_support.h"

namespace fulmen::test {
namespace {

// Calls run<kDType>() for the dtype of q.
template <template <DType> class Run>
void for_dtype(const AttentionParams& p) {
  switch (p.q.dtype) {
    case DType::kFloat64: return Run<DType::kFloat64>::run(p);
    case DType::kFloat32: return Run<DType::kFloat32>::run(p);
    case DType::kFloat16: return Run<DType::kFloat16>::run(p);
    default: return Run<DType::kBFloat16>::run(p);
  }
}

template <DType kDType>
constexpr FmaConfig config_of() {
  FmaConfig config;
  config.dtype = kDType;
  return config;
}

template <DType kDType>
struct Forward {
  static void run(const AttentionParams& p) {
    run_kernel(cuda::naive_forward(p).at(0), [&] { forward_naive<config_of<kDType>()>(p); });
  }
};

template <DType kDType>
struct Backward {
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
    for_dtype<Forward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
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
    for_dtype<Backward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, Naive, testing::Range(0u, 100u, 25u));

}  // namespace
}  // namespace fulmen::test
