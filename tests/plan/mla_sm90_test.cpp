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

// A pool of pages, and a table of slots or of pages.
Problem sparse_problem(i64 batch, i64 heads, i64 topk, i64 page_rows, bool slots) {
  Problem problem = latent_problem(batch, heads, 1, topk);
  problem.page_rows = page_rows;
  problem.num_pages = 1000;
  problem.slots = slots;
  for (const Array array : {Array::kK, Array::kV}) {
    Tensor& pool = problem.arrays[array];
    pool.shape[0] = problem.num_pages;
    pool.shape[2] = page_rows;
    pool.strides[0] = pool.strides[1] = page_rows * kLatent;
  }
  Tensor& table = problem.arrays[Array::kPageTable];
  table = {nullptr, DType::kInt32, 4, {batch, 1, 1, topk}, {topk, 0, 0, 1}};
  problem.arrays[Array::kKvLengths] = {nullptr, DType::kInt32, 4, {1, 1, 1, batch}, {0, 0, 0, 1}};
  return problem;
}

Problem with_records(Problem problem, i64 bytes) {
  const i64 dims = bytes == 584 ? 512 : kLatent;
  problem.dim_qk = dims;
  for (const Array array : {Array::kK, Array::kV}) {
    Tensor& pool = problem.arrays[array];
    pool.dtype = DType::kUint8;
    pool.shape[3] = array == Array::kK ? bytes : kValues;
    pool.strides[2] = bytes;
    pool.strides[0] = pool.strides[1] = problem.page_rows * bytes;
  }
  Tensor& q = problem.arrays[Array::kQ];
  q.shape[3] = dims;
  return problem;
}

TEST(MlaSm90Plan, TakesSlotsAndRecords) {
  EXPECT_TRUE(takes_latent(sparse_problem(8, 128, 2048, 64, true)));
  EXPECT_TRUE(takes_latent(sparse_problem(8, 16, 2048, 1, true)));
  EXPECT_TRUE(takes_latent(sparse_problem(8, 16, 2048, 5, false)));
  for (const i64 bytes : {656, 584}) {
    const Problem records = with_records(sparse_problem(8, 64, 2048, 64, true), bytes);
    const auto plan = latent_plan(records);
    EXPECT_THAT(plan->launches[0].spec.name, testing::HasSubstr(std::to_string(bytes)));
    EXPECT_THAT(plan->launches[2].spec.name, testing::HasSubstr("simt"));
    EXPECT_TRUE(takes_latent(with_records(sparse_problem(8, 64, 2048, 64, false), bytes)));
    EXPECT_FALSE(takes_latent(records, "a100"));
    Problem half = records;
    half.dtype = DType::kFloat16;
    half.arrays[Array::kQ].dtype = half.arrays[Array::kO].dtype = DType::kFloat16;
    EXPECT_FALSE(takes_latent(half));
    Problem unaligned = records;
    unaligned.arrays[Array::kK].strides[0] += 8;
    unaligned.arrays[Array::kV].strides[0] += 8;
    EXPECT_FALSE(takes_latent(unaligned));
  }
  Problem many = sparse_problem(8, 16, 2048, 64, true);  // slots of 32 bits
  many.num_pages = i64{1} << 26;
  EXPECT_FALSE(takes_latent(many));
}

// 16 rows by a cluster, as many blocks as the card has or keys want.
TEST(MlaSm90Plan, FewRowsOverRecordsAreClusters) {
  const auto launch = [](i64 batch, i64 heads, i64 topk) {
    return latent_plan(with_records(sparse_problem(batch, heads, topk, 64, true), 656))
        ->launches.front();
  };
  EXPECT_EQ(launch(8, 16, 2048).num_blocks, 8 * 8);
  EXPECT_EQ(launch(8, 8, 200).num_blocks, 8 * 4);
  EXPECT_EQ(launch(60, 16, 2048).num_blocks, 60 * 2);
  EXPECT_EQ(launch(300, 3, 2048).num_blocks, 300);
  EXPECT_EQ(launch(1, 128, 2048).num_blocks, 8 * 8);
  for (const i64 batch : {1, 8, 60, 300}) {
    EXPECT_THAT(launch(batch, 16, 2048).spec.name, testing::StartsWith("mla_few_rows"));
  }
  EXPECT_THAT(launch(8, 64, 2048).spec.name, testing::StartsWith("mla_sm90"));
}

// Workers have whole row tiles, or one that no other run of workers has, where that is cheap.
TEST(MlaSm90Plan, DividesEvenRowTilesAtTheirEnds) {
  const auto whole = mla_shares<true>(131 * 43, 66, 131);
  EXPECT_EQ(whole.num_workers(), 66);
  EXPECT_EQ(whole.begin(1), 2 * 43);
  EXPECT_EQ(whole.begin(66), 131 * 43);
  EXPECT_EQ(whole.owner(131 * 43 - 1), 65);
  const auto split = mla_shares<true>(16 * 171, 66, 16);  // 43 blocks instead of 42
  EXPECT_EQ(split.num_workers(), 64);
  EXPECT_EQ(split.begin(4), 171);
  EXPECT_EQ(split.owner(171), 4);
  EXPECT_EQ(mla_shares<true>(128 * 342, 66, 128).begin(1),
            664);                                             // 20 blocks more would be too many
  EXPECT_EQ(mla_shares<true>(128 * 43, 66, 0).begin(1), 84);  // lengths differ
  EXPECT_EQ(mla_shares<true>(0, 66, 3).num_workers(), 1);
  EXPECT_EQ(mla_shares<false>(128 * 43, 66, 128).begin(1), 84);
  for (const i32 tiles : {1, 5, 8, 66, 90, 131}) {
    for (const i32 blocks : {1, 3, 43, 342}) {
      const auto shares = mla_shares<true>(tiles * blocks, 66, tiles);
      ASSERT_LE(shares.num_workers(), 66);
      ASSERT_EQ(shares.begin(shares.num_workers()), tiles * blocks);
      for (i32 worker = 0; worker < shares.num_workers(); ++worker) {
        ASSERT_LT(shares.begin(worker), shares.begin(worker + 1));
        ASSERT_EQ(shares.owner(shares.begin(worker)), worker);
        ASSERT_EQ(shares.owner(shares.begin(worker + 1) - 1), worker);
      }
    }
  }
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
