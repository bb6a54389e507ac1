// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which calls over shared keys (kv_shared) are cascades, on every card, of which kernels, and that
// all others are what they are without.
#include <gmock/gmock.h>

#include "gpu/cascade/plan.h"
#include "gpu/implementations.h"

namespace fulmen {
namespace {

using testing::ElementsAre;
using testing::StartsWith;

Tensor of_integers(i64 count, i64 stride = 1) {
  return {nullptr, DType::kInt32, 4, {1, 1, 1, count}, {0, 0, 0, stride}};
}

// 32 query heads over 8, pages of 16 rows with heads inside, a prompt of 16k keys.
Problem shared_problem(i64 batch, i64 q_rows = 1) {
  constexpr i64 kPages = 1056, kDim = 128;
  Problem problem;
  problem.backend = Backend::kCuda;
  problem.dtype = DType::kBFloat16;
  problem.num_sequences = batch;
  problem.heads_q = 32;
  problem.heads_kv = 8;
  problem.q_rows = problem.max_q = q_rows;
  problem.page_rows = 16;
  problem.num_pages = 4096;
  problem.kv_rows = problem.max_kv = kPages * 16;
  problem.dim_qk = problem.dim_v = kDim;
  problem.score_map.scale = 1;
  problem.mask.causal = true;
  for (const Array array : {Array::kQ, Array::kO}) {
    problem.arrays[array] = {nullptr,
                             DType::kBFloat16,
                             4,
                             {batch, 32, q_rows, kDim},
                             {q_rows * 32 * kDim, kDim, 32 * kDim, 1}};
  }
  for (const Array array : {Array::kK, Array::kV}) {
    problem.arrays[array] = {nullptr,
                             DType::kBFloat16,
                             4,
                             {problem.num_pages, 8, 16, kDim},
                             {16 * 8 * kDim, kDim, 8 * kDim, 1}};
  }
  problem.arrays[Array::kPageTable] = {
      nullptr, DType::kInt32, 4, {batch, 1, 1, kPages}, {kPages, 0, 0, 1}};
  problem.arrays[Array::kKvLengths] = of_integers(batch);
  problem.arrays[Array::kKvShared] = of_integers(batch, 0);
  return problem;
}

gpu::PlanOrRefusal plan_of(const Problem& problem, const char* card) {
  for (const gpu::GpuImplementation& row : gpu::gpu_implementations()) {
    gpu::PlanOrRefusal made = gpu::plan_with(row, problem, gpu_named(card));
    if (made.plan != nullptr) return made;
  }
  return "none";
}

std::vector<std::string> kernels_of(const Problem& problem, const char* card) {
  const gpu::PlanOrRefusal made = plan_of(problem, card);
  std::vector<std::string> names;
  if (made.plan == nullptr) return names;
  for (const gpu::KernelLaunch& launch : made.plan->launches) names.push_back(launch.spec.name);
  return names;
}

bool is_cascade(const Problem& problem, const char* card = "h200") {
  const std::vector<std::string> names = kernels_of(problem, card);
  return !names.empty() && names.front().starts_with("prepare_cascade");
}

TEST(CascadePlan, HasAPassOfTheCardOverSharedKeys) {
  const auto with = [](const char* shared) {
    return ElementsAre(StartsWith("prepare_cascade_bfloat16"), StartsWith("decode_sm80_bfloat16"),
                       StartsWith(shared), StartsWith("combine_cascade_bfloat16"));
  };
  EXPECT_THAT(kernels_of(shared_problem(64), "h200"), with("forward_sm90"));
  EXPECT_THAT(kernels_of(shared_problem(64), "a100"), with("forward_sm80"));
  EXPECT_THAT(kernels_of(shared_problem(8), "h200"), with("decode_sm80"));  // 32 rows of a group
  Problem named = shared_problem(64);
  named.implementation = Implementation::kSm80;
  EXPECT_THAT(kernels_of(named, "h200"), with("forward_sm80"));
  named.implementation = Implementation::kSimt;
  EXPECT_EQ(kernels_of(named, "h200").size(), 1u);
}

// What the parts leave goes with rows, not with keys.
TEST(CascadePlan, ItsWorkspaceIsBoundedByTheCard) {
  const auto bytes = [](i64 batch) {
    return plan_of(shared_problem(batch), "h200").plan->workspace_bytes;
  };
  constexpr size_t kRow = 32 * 128 * 4;  // of all heads in float32
  EXPECT_LT(bytes(64), 64 * kRow * 16);
  EXPECT_LT(bytes(1024), 1024 * kRow * 4);
}

TEST(CascadePlan, IsForManyRequests) {
  EXPECT_TRUE(is_cascade(shared_problem(8)));
  EXPECT_FALSE(is_cascade(shared_problem(7)));
  EXPECT_FALSE(is_cascade(shared_problem(64, 17)));  // 68 rows of a request's group
  const auto with_keys = [](i64 batch, i64 keys) {
    Problem problem = shared_problem(batch);
    problem.kv_rows = problem.max_kv = keys;
    return problem;
  };
  EXPECT_TRUE(is_cascade(with_keys(32, 4096)));
  EXPECT_FALSE(is_cascade(with_keys(31, 4096)));
  EXPECT_FALSE(is_cascade(with_keys(64, 4095)));
  Problem named = with_keys(2, 300);
  named.implementation = Implementation::kSm80;
  EXPECT_TRUE(is_cascade(named));
  named.num_sequences = 1;
  EXPECT_FALSE(is_cascade(named));
}

// Where a row's place among the keys decides, or the batch may decide on nothing, kv_shared is left
// out.
TEST(CascadePlan, LeavesOutWhatItDoesNotTake) {
  const Problem plain = shared_problem(64);
  const auto expect_flat = [&plain](const char* what, const auto& change) {
    Problem problem = plain;
    change(problem);
    Problem without = problem;
    without.arrays[Array::kKvShared] = {};
    EXPECT_EQ(kernels_of(problem, "h200"), kernels_of(without, "h200")) << what;
  };
  expect_flat("window", [](Problem& p) { p.mask.window_left = 40; });
  expect_flat("prefix", [](Problem& p) { p.mask.prefix = 40; });
  expect_flat("start", [](Problem& p) { p.arrays[Array::kKvStart] = of_integers(64); });
  expect_flat("top left", [](Problem& p) { p.alignment = Alignment::kTopLeft; });
  expect_flat("invariant", [](Problem& p) { p.batch_invariant = true; });
  expect_flat("slopes", [](Problem& p) {
    p.arrays[Array::kAlibiSlopes] = {nullptr, DType::kFloat32, 4, {64, 32, 1, 1}, {0, 1, 0, 0}};
  });
  expect_flat("positions", [](Problem& p) { p.arrays[Array::kPositions] = of_integers(1); });
  expect_flat("table", [](Problem& p) { p.arrays[Array::kPageTable].strides[3] = 2; });
  expect_flat("bytes", [](Problem& p) {
    p.arrays[Array::kK].dtype = p.arrays[Array::kV].dtype = DType::kFloat8E4M3;
  });
}

}  // namespace
}  // namespace fulmen
