// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive kernels' own text, run in the emulator, against the scalar oracle over drawn
// problems.
#include "kernels/naive/naive.cuh"

#include "against_oracle.h"
#include "gpu/simt/plan.h"

namespace fulmen::test {
namespace {

template <DType kDType, bool kCaches = false>
constexpr FmaConfig config_of() {
  FmaConfig config;
  config.dtype = kDType;
  config.caches = kCaches;
  return config;
}

template <DType kDType>
struct NaiveForward {
  static void run(const AttentionParams& p, KernelRun& run) {
    run.launch(gpu::naive_forward(p).at(0), [&] { forward_naive<config_of<kDType>()>(p); });
  }
};

template <DType kDType>
struct NaiveOverCaches {
  static void run(const AttentionParams& p, KernelRun& run) {
    run.launch(gpu::naive_forward(p).at(0), [&] { forward_naive<config_of<kDType, true>()>(p); });
  }
};

template <DType kDType>
struct NaiveBackward {
  static void run(const AttentionParams& p, KernelRun& run) {
    constexpr FmaConfig kConfig = config_of<kDType>();
    for (const gpu::KernelLaunch& launch : gpu::naive_backward(p)) {
      const std::string& entry = launch.spec.function;
      if (entry == "fulmen::backward_naive_dq") {
        run.launch(launch, [&] { backward_naive_dq<kConfig>(p); });
      } else if (entry == "fulmen::backward_naive_dkdv") {
        run.launch(launch, [&] { backward_naive_dkdv<kConfig>(p); });
      } else if (entry == "fulmen::backward_naive_dbias") {
        run.launch(launch, [&] { backward_naive_dbias<kConfig>(p); });
      } else {
        run.launch(launch, [&] { backward_naive_dsinks<kConfig>(p); });
      }
    }
  }
};

class Naive : public testing::TestWithParam<unsigned> {};

TEST_P(Naive, ForwardAgreesWithTheOracle) { expect_forward_agrees<NaiveForward>(GetParam()); }

TEST_P(Naive, CachesAgreeWithTheOracle) { expect_caches_agree<NaiveOverCaches>(GetParam()); }

TEST_P(Naive, BackwardAgreesWithTheOracle) { expect_backward_agrees<NaiveBackward>(GetParam()); }

TEST(NaiveParts, AreMerged) { expect_parts_are_merged<NaiveForward>(500); }

TEST(NaiveLists, AgreeWithTheOracle) { expect_lists_agree<NaiveForward, NaiveBackward>(); }
TEST(NaiveLists, MayBeAHeadsOwn) { expect_lists_of_heads_agree<NaiveForward>(); }

// Ids that name no block count as absent, and the host is told.
TEST(NaiveLists, RecordWhatIsOutOfRange) {
  RandomProblem random(11);
  Request expected = small_request(random, DType::kFloat32, 70, 130, 8);
  expected.options.block_q = expected.options.block_kv = 64;
  Request actual = with_fresh_outputs(random, expected);
  const auto lists = [&](const std::vector<i64>& ids) {
    Tensor tensor = random.indices(DType::kInt32, ids);
    tensor.rank = 2;
    tensor.shape[0] = 2;
    tensor.shape[1] = 3;
    tensor.strides[0] = 3;
    tensor.strides[1] = 1;
    return tensor;
  };
  expected.arrays[Array::kBlocks] = lists({0, -1, -1, 2, -1, -1});
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  const std::vector<i64> good{0, -1, -1, 2, 2, -1}, beyond{0, 3, -1, 2, -1, -1};
  const std::vector<i64> below{0, -1, -2, 2, -1, -1};
  for (const auto& ids : {good, beyond, below}) {
    actual.arrays[Array::kBlocks] = lists(ids);
    FaultBytes faults{};
    AttentionParams p = gpu::attention_params(validate(actual, Pointers::kChecked), &faults);
    KernelRun run{memory_of(actual), 11};
    NaiveForward<DType::kFloat32>::run(p, run);
    expect_close(actual, expected, {Array::kO, Array::kLse}, 11);
    EXPECT_EQ(faults.bits(), ids == good ? 0u : u32{kFaultBlocks});
  }
}

TEST(NaivePlanted, WhatIsHiddenDoesNotShow) {
  expect_hidden_does_not_show<NaiveForward, NaiveBackward>();
}

TEST(NaivePlanted, RowsWithoutKeysDoNotShow) {
  expect_rows_without_keys_do_not_show<NaiveForward, NaiveBackward>();
}

TEST(NaiveArrays, SumsOfDbias) { expect_sums_of_dbias<NaiveForward, NaiveBackward>(); }

TEST(NaiveArrays, MayLieAnywhere) { expect_arrays_may_lie_anywhere<NaiveForward, NaiveBackward>(); }

INSTANTIATE_TEST_SUITE_P(Drawn, Naive, testing::Range(0u, 100u, 25u));

}  // namespace
}  // namespace fulmen::test
