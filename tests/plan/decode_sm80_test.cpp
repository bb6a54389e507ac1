// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which problems decode_sm80 takes, on every card, and what a launch and its workspace are.
#include <gmock/gmock.h>

#include "gpu/decode_sm80/plan.h"
#include "gpu/implementations.h"

namespace fulmen {
namespace {

// 32 query heads over 8.
Problem decode_problem(i64 batch, i64 q_rows, i64 kv_rows, i64 dim = 128) {
  Problem problem;
  problem.backend = Backend::kCuda;
  problem.dtype = DType::kBFloat16;
  problem.num_sequences = batch;
  problem.heads_q = 32;
  problem.heads_kv = 8;
  problem.q_rows = problem.max_q = q_rows;
  problem.kv_rows = problem.max_kv = kv_rows;
  problem.dim_qk = problem.dim_v = dim;
  problem.score_map.scale = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool is_q = array == Array::kQ || array == Array::kO;
    const i64 heads = is_q ? 32 : 8, rows = is_q ? q_rows : kv_rows;
    problem.arrays[array] = {nullptr,
                             DType::kBFloat16,
                             4,
                             {batch, heads, rows, dim},
                             {heads * rows * dim, rows * dim, dim, 1}};
  }
  return problem;
}

std::string kernel_of(const Problem& problem, const Gpu& gpu) {
  for (const gpu::GpuImplementation& row : gpu::gpu_implementations()) {
    if (auto made = gpu::plan_with(row, problem, gpu); made.plan != nullptr) {
      return made.plan->launches.back().spec.name;
    }
  }
  return "";
}

bool decodes(const Problem& problem, const char* card) {
  return kernel_of(problem, gpu_named(card)).starts_with("decode_sm80");
}

TEST(DecodeSm80Plan, IsForFewRowsAndLongKeys) {
  for (const char* card : {"a100", "rtx4090", "h200"}) {
    EXPECT_TRUE(decodes(decode_problem(1, 1, 4096), card)) << card;
    EXPECT_TRUE(decodes(decode_problem(1, 16, 4096), card)) << card;
    EXPECT_FALSE(decodes(decode_problem(1, 17, 4096), card)) << card;  // 68 rows of a group
    EXPECT_FALSE(decodes(decode_problem(1, 1, 255), card)) << card;
    EXPECT_FALSE(decodes(decode_problem(1, 1, 4096, 320), card)) << card;
  }
  EXPECT_FALSE(decodes(decode_problem(1, 1, 4096), "t4"));
  EXPECT_TRUE(decodes(decode_problem(64, 1, 4096), "a100"));
}

// On Hopper sm90 takes more than a few rows where heads and sequences fill the card, and what it is
// asked for by name.
TEST(DecodeSm80Plan, LeavesFullCardsToHopper) {
  EXPECT_TRUE(decodes(decode_problem(17, 1, 4096), "h200"));
  EXPECT_TRUE(decodes(decode_problem(17, 4, 4096), "h200"));
  EXPECT_TRUE(decodes(decode_problem(16, 5, 4096), "h200"));
  EXPECT_FALSE(decodes(decode_problem(17, 5, 4096), "h200"));
  EXPECT_FALSE(decodes(decode_problem(17, 1, 1023), "h200"));
  EXPECT_TRUE(decodes(decode_problem(16, 1, 4096, 256), "h200"));
  EXPECT_TRUE(decodes(decode_problem(17, 4, 4096, 256), "h200"));
  EXPECT_FALSE(decodes(decode_problem(17, 5, 4096, 256), "h200"));
  Problem named = decode_problem(1, 1, 4096);
  named.implementation = Implementation::kSm90;
  EXPECT_FALSE(decodes(named, "h200"));
  named.implementation = Implementation::kSm80;
  EXPECT_TRUE(decodes(named, "h200"));
}

TEST(DecodeSm80Plan, TakesNoPairsOfArraysNorUnalignedRows) {
  Problem masked = decode_problem(1, 1, 4096);
  masked.arrays[Array::kMask] = {nullptr, DType::kBool, 4, {1, 1, 1, 4096}, {0, 0, 0, 1}};
  EXPECT_FALSE(decodes(masked, "a100"));
  Problem shifted = decode_problem(1, 1, 4096);
  shifted.pointer_alignment = 8;
  EXPECT_FALSE(decodes(shifted, "a100"));
}

// With rows as columns, and in pages, twice the keys a step, where a card has the shared memory for
// it and every block two such steps.
TEST(DecodeSm80Plan, TakesMoreKeysAtATime) {
  EXPECT_EQ(gpu::decode_sm80_config(decode_problem(1, 1, 4096), gpu_named("h200")).kv_rows, 32);
  EXPECT_EQ(gpu::decode_sm80_config(decode_problem(1, 1, 4095), gpu_named("h200")).kv_rows, 16);
  Problem problem = decode_problem(10, 3, 4096);
  EXPECT_EQ(gpu::decode_sm80_config(problem, gpu_named("h200")).kv_rows, 16);
  problem.page_rows = 16;
  const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu_named("h200"));
  EXPECT_EQ(config.kv_rows, 32);
  EXPECT_EQ(config.splits, 8);
  EXPECT_EQ(config.stages, 1);
  EXPECT_EQ(gpu::decode_sm80_config(problem, gpu_named("rtx4090")).kv_rows, 16);
}

// Rows of 128 dims are of one head or of neighbours, as far as one warp has the rows of q of all.
TEST(DecodeSm80Plan, NeighbouringHeadsShareARowTile) {
  const auto heads = [](i64 dim, i64 heads_q, i64 heads_kv, i64 q_rows = 1) {
    Problem problem = decode_problem(4, q_rows, 4096, dim);
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu_named("h200"));
    EXPECT_LE(config.heads * q_rows * heads_q / heads_kv, max(config.rows(), i32{64}));
    return config.heads;
  };
  EXPECT_EQ(heads(64, 32, 32), 2);
  EXPECT_EQ(heads(64, 32, 8), 2);
  EXPECT_EQ(heads(64, 32, 8, 2), 1);
  EXPECT_EQ(heads(64, 32, 2), 1);
  EXPECT_EQ(heads(64, 9, 9), 1);
  EXPECT_EQ(heads(32, 32, 32), 4);
  EXPECT_EQ(heads(32, 32, 8), 2);
  EXPECT_EQ(heads(48, 32, 32), 1);
  EXPECT_EQ(heads(128, 32, 32), 1);
}

// Two heads of 16 rows have a warp each, where such pairs fill the card.
TEST(DecodeSm80Plan, TwoHeadsHaveAWarpEach) {
  const auto heads = [](i64 batch, i64 heads_q, i64 heads_kv, i64 q_rows = 1, i64 dim = 64) {
    Problem problem = decode_problem(batch, q_rows, 4096, dim);
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu_named("h200"));
    EXPECT_EQ(config.heads, config.row_warps);
    EXPECT_TRUE(config.heads == 1 || config.whole);
    return config.heads;
  };
  EXPECT_EQ(heads(128, 32, 2), 2);
  EXPECT_EQ(heads(93, 32, 2), 2);
  EXPECT_EQ(heads(128, 32, 2, 1, 128), 1);
  EXPECT_EQ(heads(45, 32, 2), 1);
  EXPECT_EQ(heads(128, 30, 2), 1);
}

Problem quantised_problem(DType dtype, i64 dim = 128) {
  Problem problem = decode_problem(1, 1, 4096, dim);
  for (const Array array : {Array::kK, Array::kV}) problem.arrays[array].dtype = dtype;
  problem.arrays[Array::kKScale] = {nullptr, DType::kFloat32, 4, {1, 8, 4096, 1}, {0, 0, 1, 0}};
  return problem;
}

// Of 8 bits a vector has 16 elements; few keys too, since no other kernel on tensor cores takes
// them.
TEST(DecodeSm80Plan, TakesKeysOfEightBits) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    for (const char* card : {"a100", "rtx4090", "h200"}) {
      EXPECT_TRUE(decodes(quantised_problem(dtype), card)) << card;
      EXPECT_TRUE(decodes(quantised_problem(dtype, 80), card)) << card;
      EXPECT_FALSE(decodes(quantised_problem(dtype, 72), card)) << card;
    }
    Problem few = quantised_problem(dtype);
    few.max_kv = few.kv_rows = 5;
    EXPECT_TRUE(decodes(few, "h200"));
    Problem wide = quantised_problem(dtype);
    wide.dtype = DType::kFloat32;
    for (const Array array : {Array::kQ, Array::kO}) wide.arrays[array].dtype = DType::kFloat32;
    EXPECT_FALSE(decodes(wide, "h200"));
    Problem shifted = quantised_problem(dtype);
    shifted.arrays[Array::kK].strides[1] += 8;
    EXPECT_FALSE(decodes(shifted, "h200"));
    const DecodeSm80Config config =
        gpu::decode_sm80_config(quantised_problem(dtype, 80), gpu_named("h200"));
    EXPECT_EQ(config.quantised, dtype);
    EXPECT_TRUE(config.scaled);
    EXPECT_EQ(config.d_qk, 96);
  }
}

// Where bits may not depend on neighbours neither may the kernel, its tile and its cuts.
TEST(DecodeSm80Plan, ChunksWhereBitsAreARequestsOwn) {
  const Gpu gpu = gpu_named("h200");
  for (const i64 batch : {1, 17, 300}) {
    for (const i64 q_rows : {1, 4}) {
      Problem problem = decode_problem(batch, q_rows, 4096);
      problem.batch_invariant = true;
      EXPECT_TRUE(decodes(problem, "h200"));
      const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu);
      EXPECT_EQ(config.row_warps, 1);
      EXPECT_EQ(config.chunk_blocks * config.block_keys(), 1024);
    }
    for (const char* card : {"a100", "h200"}) {
      Problem problem = decode_problem(batch, 16, 4096);  // 64 rows
      problem.batch_invariant = true;
      EXPECT_TRUE(decodes(problem, card)) << card;
      const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu_named(card));
      EXPECT_EQ(config.row_warps, 4);
      EXPECT_EQ(config.chunk_blocks * config.block_keys(), config.in_warpgroups() ? 4096 : 1024);
    }
  }
}

// More than 16 rows on Hopper: a warpgroup's 64, of dims in rows of 128 bytes, in as many splits as
// shared memory holds; elsewhere, of bytes and in pages of few rows, two or four warps. So of up to
// 32 rows and 128 dims, but for clusters.
TEST(DecodeSm80Plan, MoreThanSixteenRowsAreAWarpgroups) {
  const auto config_of = [](i64 q_rows, i64 dim, const char* card) {
    return gpu::decode_sm80_config(decode_problem(2, q_rows, 32768, dim), gpu_named(card));
  };
  EXPECT_FALSE(config_of(4, 64, "h200").in_warpgroups());
  for (const i64 q_rows : {5, 9, 16}) {
    for (const auto& [dim, padded, splits, kv_rows] :
         {std::tuple{64, 64, 2, 64}, {96, 128, 2, 64}, {128, 128, 2, 64}, {256, 256, 2, 32}}) {
      const DecodeSm80Config config = config_of(q_rows, dim, "h200");
      const bool are_warps = q_rows == 5 && dim <= 128;
      EXPECT_EQ(config.in_warpgroups(), !are_warps);
      if (are_warps) continue;
      EXPECT_EQ(config.row_warps, 4);
      EXPECT_EQ(config.d_qk, padded);
      EXPECT_EQ(config.d_v, padded);
      EXPECT_EQ(config.splits, splits);
      EXPECT_EQ(config.kv_rows, kv_rows);
      EXPECT_EQ(config.box_rows, kv_rows);
    }
    EXPECT_FALSE(config_of(q_rows, 128, "a100").in_warpgroups());
    EXPECT_EQ(config_of(q_rows, 128, "a100").row_warps, q_rows == 5 ? 2 : 4);
  }
  for (const i64 q_rows : {5, 16}) {
    const Problem few = decode_problem(1, q_rows, 4096);
    EXPECT_EQ(gpu::decode_sm80_config(few, gpu_named("h200")).cluster, 8);
    EXPECT_TRUE(gpu::decode_sm80_config(few, gpu_named("h200")).in_warpgroups());
  }
  Problem bytes = quantised_problem(DType::kFloat8E4M3);
  bytes.q_rows = bytes.max_q = 16;
  EXPECT_FALSE(gpu::decode_sm80_config(bytes, gpu_named("h200")).in_warpgroups());
  Problem paged = decode_problem(8, 16, 32768);
  paged.num_pages = 4096;
  for (const auto& [page_rows, box_rows] :
       {std::pair{1, 0}, {24, 8}, {16, 16}, {48, 16}, {256, 64}}) {
    paged.page_rows = page_rows;
    EXPECT_EQ(gpu::decode_sm80_config(paged, gpu_named("h200")).box_rows, box_rows);
  }
}

// A cluster for every row tile, where such clusters are half of the card or more; and pairs where
// lengths differ.
TEST(DecodeSm80Plan, ClustersForFewRowTiles) {
  const auto launch = [](const Problem& problem, const char* card) {
    const gpu::PlanOrRefusal made = gpu::plan_decode_sm80(problem, gpu_named(card));
    const gpu::KernelLaunch& first = made.plan->launches[0];
    EXPECT_EQ(first.num_blocks % first.cluster_size, 0);
    return std::pair<i64, unsigned>{first.num_blocks, first.cluster_size};
  };
  EXPECT_EQ(launch(decode_problem(1, 1, 4096), "h200"), std::pair(i64{64}, 8u));
  EXPECT_EQ(launch(decode_problem(8, 1, 65536), "h200"), std::pair(i64{128}, 2u));
  EXPECT_EQ(launch(decode_problem(2, 1, 4096), "h200"), std::pair(i64{64}, 4u));
  EXPECT_EQ(launch(decode_problem(3, 1, 4096), "h200"), std::pair(i64{96}, 4u));
  EXPECT_EQ(launch(decode_problem(8, 1, 4096, 256), "h200"), std::pair(i64{128}, 2u));
  EXPECT_EQ(launch(decode_problem(9, 1, 4096), "h200"), std::pair(i64{128}, 1u));
  EXPECT_EQ(launch(decode_problem(1, 1, 4096), "a100").second, 1u);
  EXPECT_EQ(launch(decode_problem(1, 3, 4096), "h200"), std::pair(i64{64}, 8u));
  EXPECT_EQ(launch(decode_problem(1, 5, 4096), "h200").second, 8u);
  Problem other = decode_problem(8, 1, 4096);
  other.batch_invariant = true;
  EXPECT_EQ(launch(other, "h200").second, 1u);
  for (const auto& [batch, size] : {std::pair{1, 8u}, {2, 1u}, {4, 1u}, {8, 2u}}) {
    other = decode_problem(batch, 1, 4096);
    other.page_rows = 16;
    other.arrays[Array::kKvLengths].dtype = DType::kInt32;
    EXPECT_EQ(launch(other, "h200").second, size) << batch;
    EXPECT_EQ(gpu::decode_sm80_config(other, gpu_named("h200")).whole, batch == 1);
  }
  for (const auto& [dim, keys, size] :
       {std::tuple{128, 65536, 8u}, {64, 65536, 1u}, {64, 4096, 8u}}) {
    other = decode_problem(1, 1, keys, dim);
    other.page_rows = 16;
    other.arrays[Array::kKvLengths].dtype = DType::kInt32;
    EXPECT_EQ(launch(other, "h200").second, size) << dim << " " << keys;
  }
}

// Fewer row tiles are taken whole where there is little to read; else clusters divide their keys,
// so large that few parts are to be added.
TEST(DecodeSm80Plan, ClustersOfHeadsThatDoNotFillTheCard) {
  const auto launch = [](i64 heads_kv, i64 keys, DType dtype = DType::kBFloat16) {
    Problem problem = decode_problem(1, 1, keys);
    problem.heads_q = 4 * heads_kv;
    problem.heads_kv = heads_kv;
    for (const Array array : {Array::kK, Array::kV}) problem.arrays[array].dtype = dtype;
    const gpu::PlanOrRefusal made = gpu::plan_decode_sm80(problem, gpu_named("h200"));
    const gpu::KernelLaunch& first = made.plan->launches[0];
    return std::pair<i64, unsigned>{first.num_blocks, first.cluster_size};
  };
  for (const i64 heads : {1, 2, 4}) EXPECT_EQ(launch(heads, 4096), std::pair(8 * heads, 8u));
  for (const i64 heads : {1, 2, 4}) EXPECT_EQ(launch(heads, 8192), std::pair(16 * heads, 16u));
  for (const i64 heads : {2, 4}) EXPECT_EQ(launch(heads, 16384), std::pair(16 * heads, 16u));
  EXPECT_EQ(launch(1, 65536), std::pair(i64{120}, 8u));
  EXPECT_EQ(launch(1, 8193), std::pair(i64{72}, 8u));  // blocks of 1,024 keys
  EXPECT_EQ(launch(2, 16385), std::pair(i64{120}, 4u));
  EXPECT_EQ(launch(4, 16385), std::pair(i64{128}, 2u));
  EXPECT_EQ(launch(8, 16385, DType::kInt8), std::pair(i64{128}, 1u));
  EXPECT_EQ(launch(8, 16384, DType::kInt8), std::pair(i64{64}, 8u));
  EXPECT_EQ(launch(4, 65536, DType::kInt8), std::pair(i64{132}, 1u));
}

// Whole row tiles of half the splits where there are many: of 16 rows, and of several heads where
// every multiprocessor has one; else workers that divide row tiles evenly.
TEST(DecodeSm80Plan, DealsOutWholeRowTiles) {
  const auto blocks = [](i64 batch, i64 heads_kv, i64 dim, bool whole, bool lengths = false) {
    Problem problem = decode_problem(batch, 1, 4096, dim);
    problem.heads_kv = heads_kv;
    if (lengths) problem.arrays[Array::kKvLengths].dtype = DType::kInt32;
    const Gpu gpu = gpu_named("h200");
    const DecodeSm80Config config = gpu::decode_sm80_config(problem, gpu);
    EXPECT_EQ(config.whole, whole) << batch << " " << heads_kv << " " << dim;
    EXPECT_EQ(config.min_blocks, whole && config.heads == config.heads_of_warp() ? 2 : 1);
    return gpu::plan_decode_sm80(problem, gpu).plan->launches[0].num_blocks;
  };
  for (const i64 dim : {64, 128, 256}) {
    EXPECT_EQ(blocks(128, 2, dim, true), dim == 64 ? 128 : 256);  // pairs of heads
    EXPECT_EQ(blocks(48, 2, dim, true), 96);
    EXPECT_EQ(blocks(45, 2, dim, false), 132);
    EXPECT_EQ(blocks(128, 2, dim, false, true), 128);
  }
  EXPECT_EQ(blocks(32, 8, 64, true), 128);
  EXPECT_EQ(blocks(128, 8, 64, false), 128);
  EXPECT_EQ(blocks(100, 8, 64, false), 132);
  EXPECT_EQ(blocks(16, 8, 128, false), 128);
}

// As many workers for every head of k and v; the workspace follows from the grid, not from batch
// or length.
TEST(DecodeSm80Plan, WorkspaceFollowsFromTheGrid) {
  const Gpu gpu = gpu_named("h200");
  size_t bytes = 0;
  for (const i64 batch : {9, 16}) {
    for (const i64 keys : {i64{65536}, i64{1} << 20}) {
      const gpu::PlanOrRefusal made = gpu::plan_decode_sm80(decode_problem(batch, 1, keys), gpu);
      ASSERT_NE(made.plan, nullptr);
      EXPECT_EQ(made.plan->launches[0].num_blocks, 128);
      EXPECT_EQ(made.plan->zeroed_bytes, 0u);
      if (bytes == 0) bytes = made.plan->workspace_bytes;
      EXPECT_EQ(made.plan->workspace_bytes, bytes);
    }
  }
  const gpu::PlanOrRefusal widest = gpu::plan_decode_sm80(decode_problem(4, 16, 65536, 256), gpu);
  EXPECT_LT(widest.plan->workspace_bytes, size_t{20} << 20);
}

}  // namespace
}  // namespace fulmen
