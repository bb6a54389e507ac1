// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The simt kernels' own text, compiled for the host, against the scalar oracle over drawn problems.
// One small tile for each dtype, so that the problems have several blocks in both directions.
#include "cpu/backend.h"
#include "kernel_support.h"
#include "kernels/backward_naive.cuh"
#include "kernels/backward_simt_dbias.cuh"
#include "kernels/backward_simt_dkdv.cuh"
#include "kernels/backward_simt_dq.cuh"
#include "kernels/backward_simt_dsinks.cuh"
#include "kernels/forward_simt.cuh"
#include "planted.h"

namespace fulmen::test {
namespace {

template <DType kDType>
constexpr FmaConfig config_of() {
  FmaConfig config;
  config.dtype = kDType;
  config.num_threads = 64;
  config.rows = 16;
  config.columns = 16;
  config.max_dim_qk = config.max_dim_v = 96;  // drawn dims are at most 80
  return config;
}

template <DType kDType>
struct SimtForward {
  static void run(const AttentionParams& p) {
    constexpr FmaConfig kConfig = config_of<kDType>();
    host::run_grid(num_q_tiles(p, kConfig.rows), kConfig.num_threads,
                   kConfig.forward_shared_bytes(), [&] { forward_simt<kConfig>(p); });
  }
};

template <DType kDType>
struct SimtBackward {
  static void run(const AttentionParams& p) {
    constexpr FmaConfig kConfig = config_of<kDType>();
    if (p.dq.present()) {
      host::run_grid(num_q_tiles(p, kConfig.rows), kConfig.num_threads,
                     kConfig.backward_shared_bytes(), [&] { backward_simt_dq<kConfig>(p); });
    }
    if (p.dk.present() || p.dv.present()) {
      host::run_grid(num_kv_tiles(p, kConfig.rows), kConfig.num_threads,
                     kConfig.backward_shared_bytes(), [&] { backward_simt_dkdv<kConfig>(p); });
    }
    if (p.dbias.present()) {
      host::run_grid(dbias_tiles(p, kConfig.rows, kConfig.columns), kConfig.num_threads,
                     kConfig.backward_shared_bytes(), [&] { backward_simt_dbias<kConfig>(p); });
    }
    if (p.dsinks.present()) {
      host::run_grid(p.heads_q, kConfig.num_threads, kConfig.num_threads * sizeof(double),
                     [&] { backward_simt_dsinks<kConfig>(p); });
    }
  }
};

class SimtOnHost : public testing::TestWithParam<unsigned> {};

TEST_P(SimtOnHost, ForwardAgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + 25; ++seed) {
    RandomProblem random(seed);
    const Request expected = random.draw();
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    for_dtype<SimtForward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(SimtOnHost, BackwardAgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + 25; ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, (seed % 31) | 1u << (seed % 3));
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    for_dtype<SimtBackward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
  }
}

TEST(SimtOnHostPlanted, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request expected = planted_request(random, dtype);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    for_dtype<SimtForward>(cuda::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, {Array::kO, Array::kLse}, 7);

    const Request gradients = to_backward(random, expected, 7);
    const Request others = with_fresh_outputs(random, gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    for_dtype<SimtBackward>(cuda::attention_params(validate(others, Pointers::kChecked)));
    expect_close(others, gradients, {Array::kDQ, Array::kDK, Array::kDV}, 7);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, SimtOnHost, testing::Range(200u, 300u, 25u));

}  // namespace
}  // namespace fulmen::test
