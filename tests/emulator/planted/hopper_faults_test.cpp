// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 with one fault at a time: each is found, and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "emulator/copies.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/planted/planted.h"
#include "kernels/forward_sm90/forward_sm90.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ForwardSm90Config kConfig{
    .d_qk = 64, .d_v = 64, .kv_rows = 64, .score = {.mask_kind = MaskKind::kRight}};
using Shared = ForwardStorage<kConfig>;
constexpr i32 kRows = 300;
constexpr u32 kStageBytes = static_cast<u32>(kConfig.k_bytes());

struct Arrays {
  std::vector<u16> q = std::vector<u16>(kRows * 64, 0x3c00), k = q, v = q, o = q;
  std::vector<float> lse = std::vector<float>(kRows);
};

TensorMap map_of(std::vector<u16>& array, i32 box_rows, bool swizzled = true) {
  emulator::HostTensorMap map{reinterpret_cast<u8*>(array.data()),
                              {2, 128, 128 * kRows, 128 * kRows},
                              {64, kRows, 1, 1},
                              box_rows};
  map.swizzled = swizzled;
  return emulator::encode(map);
}

// What the emulator says of a run with the fault; `swizzled`: as the tensor map of K says.
std::string complaint(const char* fault, u32 seed = 1, bool swizzled = true) {
  Arrays arrays;
  u32 next_block = 0;
  ForwardArguments arguments{};
  arguments.maps = {map_of(arrays.q, 64), map_of(arrays.k, kConfig.kv_rows, swizzled),
                    map_of(arrays.v, kConfig.kv_rows), map_of(arrays.o, 64)};
  IntervalMask causal;
  causal.causal = true;
  arguments.params = {.batch = 1,
                      .heads_q = 1,
                      .heads_kv = 1,
                      .shape = {kRows, kRows, 0},
                      .mask = causal,
                      .scale_log2 = 0.18f,
                      .num_q_blocks = static_cast<i32>(ceil_div(kRows, kConfig.q_rows())),
                      .heads_per_group = 1,
                      .next_block = &next_block,
                      .scale = 0.125f};
  const i64 rows = kRows;
  arguments.params.attention.o = {
      reinterpret_cast<u8*>(arrays.o.data()), {rows * 64, rows * 64, 64, 1}, kConfig.dtype};
  arguments.params.attention.lse = {
      reinterpret_cast<u8*>(arrays.lse.data()), {rows, rows, 1, 1}, DType::kFloat32};
  arguments.params.attention.dim_v = 64;
  const u32 q_bytes = static_cast<u32>(kConfig.q_bytes());
  const u32 stages = static_cast<u32>(kConfig.stages);
  EXPECT_TRUE(planted::choose(fault)) << fault;
  try {
    emulator::launch({.blocks = 1,
                      .threads = kConfig.threads(),
                      .shared_bytes = kConfig.shared_bytes(),
                      .seed = seed,
                      .kernel = "forward_sm90",
                      .shared_arrays = {{"sQ", 0, Shared::kK, q_bytes},
                                        {"sK", Shared::kK, stages * kStageBytes, kStageBytes},
                                        {"sV", Shared::kV, stages * kStageBytes, kStageBytes},
                                        {"sO", Shared::kO, Shared::kWorkTiles - Shared::kO, 128},
                                        {"work_tiles", Shared::kWorkTiles,
                                         2 * Shared::kWorkTileBytes, Shared::kWorkTileBytes}}},
                     [&] { forward_sm90<kConfig>(arguments); });
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(HopperFaults, NoneIsNone) { EXPECT_EQ(complaint(""), "nothing"); }

TEST(HopperFaults, Fences) {
  EXPECT_THAT(complaint("sm90_forward_o_fence"),
              AllOf(HasSubstr("forward_sm90: block 0, warp "), HasSubstr(".cuh:"),
                    HasSubstr("missing fence.proxy.async: a tensor store of warp "),
                    HasSubstr(" reads sO[")));
  EXPECT_THAT(complaint("sm90_forward_init_fence"), HasSubstr("missing fence.mbarrier_init"));
  EXPECT_THAT(complaint("sm90_scores_product_fence"), HasSubstr("missing wgmma.fence"));
}

TEST(HopperFaults, Waits) {
  EXPECT_THAT(complaint("sm90_forward_product_wait"),
              HasSubstr(" of an accumulator before wgmma.wait_group has covered its product"));
  EXPECT_THAT(complaint("sm90_forward_store_wait"),
              HasSubstr("ends before its tensor stores have"));
  EXPECT_THAT(complaint("sm90_forward_work_tile_unshared"),
              AllOf(HasSubstr("race: "), HasSubstr(" work_tiles[")));
}

// Too early where the data is not there yet; where it is, for a phase two behind.
TEST(HopperFaults, SwappedPhase) {
  i32 num_late = 0;
  for (u32 seed = 1; seed <= 8; ++seed) {
    const std::string said = complaint("sm90_forward_k_other_phase", seed);
    const bool late = said.find("two behind") != std::string::npos;
    num_late += late;
    EXPECT_THAT(said, late ? HasSubstr("waits for phase -1 of the mbarrier at shared address ")
                           : HasSubstr(" sK[0], byte "));
  }
  EXPECT_GT(num_late, 0);
  EXPECT_THAT(complaint("sm90_empty_other_phase"), HasSubstr("deadlock"));
}

TEST(HopperFaults, WrongBarrier) {
  EXPECT_THAT(complaint("sm90_forward_k_frees_next"), HasSubstr(" arrivals"));
  EXPECT_THAT(complaint("sm90_bytes_too_many"),
              AllOf(HasSubstr("deadlock"), HasSubstr("and 16 bytes")));
}

TEST(HopperFaults, OneStageTooFew) {
  EXPECT_THAT(complaint("sm90_forward_one_stage_of_k"),
              AllOf(HasSubstr("race: a copy to the mbarrier at shared address "),
                    HasSubstr(" writes sK[0], byte 0")));
}

TEST(HopperFaults, WrongSwizzle) {
  EXPECT_THAT(complaint("", 1, false), AllOf(HasSubstr("wrong swizzle: "), HasSubstr("sK[0]")));
}

}  // namespace
}  // namespace fulmen::test
