// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table of cards and what is computed from it.
#include "plan/gpu.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "plan/explain.h"

namespace fulmen {
namespace {

TEST(KnownGpus, AreWhole) {
  int previous = 0;
  for (const Gpu& gpu : known_gpus()) {
    EXPECT_GE(gpu.compute_capability, previous) << gpu.name;
    EXPECT_GE(gpu.compute_capability, kMinComputeCapability);
    previous = gpu.compute_capability;
    EXPECT_GT(gpu.num_multiprocessors, 0);
    EXPECT_GE(gpu.shared_bytes_per_multiprocessor, gpu.shared_bytes_per_block);
    EXPECT_GT(gpu.bandwidth, 1e11);
    EXPECT_GT(gpu.tensor_flops, gpu.float32_flops);
    EXPECT_GT(gpu.float32_flops, gpu.float64_flops);
  }
}

TEST(GpuNamed, ByCardByArchitectureAndByFamily) {
  EXPECT_EQ(gpu_named("h200").name, "h200");
  EXPECT_EQ(gpu_named("sm_90a").name, "h100");
  EXPECT_EQ(gpu_named("sm_90").name, "h100");
  EXPECT_EQ(gpu_named("sm_86").name, "rtx3090");
  EXPECT_THROW(gpu_named("sm_70"), Error);
}

TEST(GpuLike, IsOfTheNearestOlderArchitecture) {
  EXPECT_EQ(gpu_like(87).compute_capability, 86);
  EXPECT_EQ(gpu_like(103).compute_capability, 100);
  EXPECT_EQ(gpu_like(75).name, "t4");
}

// Figures from the occupancy calculator of CUDA 12.
TEST(BlocksPerMultiprocessor, IsBoundByEachResource) {
  const Gpu& h100 = gpu_named("h100");
  EXPECT_EQ(blocks_per_multiprocessor(h100, 32, 1024, 0), 2);          // threads
  EXPECT_EQ(blocks_per_multiprocessor(h100, 16, 32, 0), 32);           // blocks
  EXPECT_EQ(blocks_per_multiprocessor(h100, 168, 384, 0), 1);          // registers
  EXPECT_EQ(blocks_per_multiprocessor(h100, 128, 256, 0), 2);          // registers
  EXPECT_EQ(blocks_per_multiprocessor(h100, 32, 128, 100 * 1024), 2);  // shared memory
  EXPECT_EQ(blocks_per_multiprocessor(h100, 32, 128, 232448), 1);
  EXPECT_EQ(blocks_per_multiprocessor(gpu_named("t4"), 32, 1024, 0), 1);
}

TEST(Json, EscapesAndNumbers) {
  EXPECT_EQ(json::quoted("a \"b\" \\ \n"), "\"a \\\"b\\\" \\\\ \\u000a\"");
  EXPECT_EQ(json::number(0.1), "0.10000000000000001");
  EXPECT_EQ(json::number(1.0 / 0.0), "null");
  EXPECT_EQ(json::list({"1", "null"}), "[1, null]");
}

}  // namespace
}  // namespace fulmen
