// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 with one fault at a time: each is found, and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "emulator/launch.h"
#include "emulator/planted/planted.h"
#include "emulator/request_memory.h"
#include "gpu/params.h"
#include "kernels/forward_sm80/forward_sm80.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ForwardSm80Config config() {
  ForwardSm80Config config;
  config.dtype = DType::kBFloat16;
  config.d_qk = config.d_v = 64;
  config.warps = 2;
  config.kv_rows = 32;
  config.stages = 2;
  return config;
}
constexpr ForwardSm80Config kConfig = config();

// 1 x 1 x rows x 64, all ones, without gaps.
Tensor ones(RandomProblem& random, i64 rows) {
  Tensor tensor = random.array(DType::kBFloat16, {1, 1, rows, 64});
  const i64 strides[] = {rows * 64, rows * 64, 64, 1};
  std::copy(strides, strides + 4, tensor.strides);
  RandomProblem::for_each(tensor, [&](const i64* at) {
    store_real(RandomProblem::address(tensor, at), tensor.dtype, 1);
  });
  return tensor;
}

// What the emulator says of 70 queries and 100 keys with the fault; lengths as the kernel is told.
std::string complaint(const char* fault, i64 q_rows = 70, i64 kv_rows = 100) {
  RandomProblem random(1);
  Request request;
  request.arrays[Array::kQ] = ones(random, 70);
  request.arrays[Array::kK] = ones(random, 100);
  request.arrays[Array::kV] = ones(random, 100);
  request.arrays[Array::kO] = ones(random, 70);
  request.options.scale = 0.125;
  emulator::GlobalMemory memory = memory_of(request);
  const AttentionParams attention = gpu::attention_params(validate(request, Pointers::kChecked));
  ForwardSm80Params params{{attention, kConfig, 1}, {}, attention};
  const i64 blocks = num_forward_sm80_blocks(params.attention, kConfig);
  params.attention.q_rows = q_rows;
  params.attention.kv_rows = kv_rows;
  const u32 k_begin = kConfig.q_bytes(), k_bytes = kConfig.k_bytes();
  const u32 v_begin = k_begin + kConfig.stages * k_bytes, v_bytes = kConfig.v_bytes();
  EXPECT_TRUE(planted::choose(fault)) << fault;
  try {
    emulator::launch({.blocks = blocks,
                      .threads = kConfig.threads(),
                      .shared_bytes = static_cast<i32>(kConfig.shared_bytes()),
                      .seed = 1,
                      .kernel = "forward_sm80",
                      .memory = &memory,
                      .shared_arrays = {{"sQ", 0, k_begin, 128},
                                        {"sK", k_begin, v_begin - k_begin, k_bytes},
                                        {"sV", v_begin, kConfig.stages * v_bytes, v_bytes}}},
                     [&] { forward_sm80<kConfig>(params); });
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(AmpereFaults, NoneIsNone) { EXPECT_EQ(complaint(""), "nothing"); }

TEST(AmpereFaults, CopyReadBeforeItIsWaitedFor) {
  EXPECT_THAT(
      complaint("sm80_forward_next_stage_not_awaited"),
      AllOf(HasSubstr("forward_sm80: block 0, warp "), HasSubstr("race: reads s"),
            HasSubstr("which cp.async of warp "), HasSubstr("kernels/common/tile_copy_sm80.cuh:")));
}

TEST(AmpereFaults, MissingBarrier) {
  EXPECT_THAT(complaint("sm80_forward_stage_no_barrier"),
              AllOf(HasSubstr("race: reads s"), HasSubstr("without a barrier or wait in between")));
}

TEST(AmpereFaults, BoundsOffByOne) {
  EXPECT_THAT(complaint("", 70, 101), HasSubstr("out of bounds: reads 16 bytes at "));
  EXPECT_THAT(complaint("", 71, 100), HasSubstr("out of bounds: "));
}

}  // namespace
}  // namespace fulmen::test
