// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which problems mla_sm90 takes, and what its launches and workspace are.
#include <gmock/gmock.h>

#include "gpu/implementations.h"
#include "gpu/mla_sm90/plan.h"

namespace fulmen {
namespace {

constexpr i64 kLatent = 576, kValues = 512;

// v as the first columns of k, by all but its pointer.
Problem latent_problem(i64 batch, i64 heads, i64 q_rows, i64 kv_rows) {
  Problem problem;
  problem.backend = Backend::kCuda;
  problem.dtype = DType::kBFloat16;
  problem.num_sequences = batch;
  problem.heads_q = heads;
  problem.heads_kv = 1;
  problem.q_rows = problem.max_q = q_rows;
  problem.kv_rows = problem.max_kv = kv_rows;
  problem.dim_qk = kLatent;
  problem.dim_v = kValues;
  problem.score_map.scale = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool is_q = array == Array::kQ || array == Array::kO;
    const i64 extent = is_q ? heads : 1, rows = is_q ? q_rows : kv_rows;
    const i64 row = array == Array::kO ? kValues : kLatent;
    const i64 dim = array == Array::kO || array == Array::kV ? kValues : kLatent;
    problem.arrays[array] = {nullptr,
                             DType::kBFloat16,
                             4,
                             {batch, extent, rows, dim},
                             {extent * rows * row, rows * row, row, 1}};
  }
  return problem;
}

std::unique_ptr<gpu::GpuPlan> latent_plan(const Problem& problem, const char* card = "h200") {
  for (const gpu::GpuImplementation& row : gpu::gpu_implementations()) {
    if (auto made = gpu::plan_with(row, problem, gpu_named(card)); made.plan != nullptr) {
      return std::move(made.plan);
    }
  }
  return nullptr;
}

bool takes_latent(const Problem& problem, const char* card = "h200") {
  return latent_plan(problem, card)->launches.front().spec.name.starts_with("mla_sm90");
}

TEST(MlaSm90Plan, IsForValuesThatAreColumnsOfKeys) {
  for (const i64 heads : {1, 16, 128}) {
    EXPECT_TRUE(takes_latent(latent_problem(4, heads, 1, 4096))) << heads;
    EXPECT_TRUE(takes_latent(latent_problem(1, heads, 3, 64))) << heads;
  }
  EXPECT_FALSE(takes_latent(latent_problem(4, 16, 1, 4096), "a100"));
  Problem apart = latent_problem(4, 16, 1, 4096);
  apart.arrays[Array::kV].strides[2] = kValues;
  EXPECT_FALSE(takes_latent(apart));
  Problem unaligned = latent_problem(4, 16, 1, 4096);
  unaligned.pointer_alignment = 8;
  EXPECT_FALSE(takes_latent(unaligned));
  Problem capped = latent_problem(4, 16, 1, 4096);
  capped.score_map.softcap = 2;
  EXPECT_FALSE(takes_latent(capped));
  Problem invariant = latent_problem(4, 16, 1, 4096);
  invariant.batch_invariant = true;
  EXPECT_FALSE(takes_latent(invariant));
}

TEST(MlaSm90Plan, FillsTheCard) {
  const auto many = latent_plan(latent_problem(128, 128, 1, 4096));  // two row tiles
  ASSERT_EQ(many->launches.size(), 3u);
  EXPECT_EQ(many->launches[0].num_blocks, 132);
  EXPECT_EQ(many->launches[1].num_blocks, 66 * 2);  // each worker may leave one to add
  EXPECT_THAT(many->launches[2].spec.name, testing::StartsWith("forward_sm80"));
  const auto one = latent_plan(latent_problem(1, 16, 1, 4096));
  EXPECT_EQ(one->launches[0].num_blocks, 86);  // blocks of 48 keys
  EXPECT_EQ(one->launches[1].num_blocks, 64);
  EXPECT_EQ(one->workspace_bytes, static_cast<size_t>(2 * 86 * MlaSm90Config::part_floats()) * 4);
  const auto short_keys = latent_plan(latent_problem(8, 64, 1, 128));
  EXPECT_EQ(short_keys->launches[1].num_blocks, 8 * 16);
}

}  // namespace
}  // namespace fulmen
