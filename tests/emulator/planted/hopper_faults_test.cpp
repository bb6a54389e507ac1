// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 with one fault at a time: each is found, and named.
#include "planted.h"
// after the functions that it shall call
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "emulator/copies.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "kernels/forward_sm90/forward_sm90.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ForwardSm90Config kConfig{
    .d_qk = 64, .d_v = 64, .kv_rows = 64, .score = {.mask_kind = MaskKind::kRight}};
using Shared = ForwardStorage<kConfig>;
constexpr Shared kShared{emulator::kSharedBase};
constexpr i32 kRows = 300;
constexpr u32 kStageBytes = static_cast<u32>(kConfig.k_bytes());

struct Arrays {
  std::vector<u16> q = std::vector<u16>(kRows * 64, 0x3c00), k = q, v = q, o = q;
  std::vector<float> lse = std::vector<float>(kRows);
};

TensorMap map_of(std::vector<u16>& array, i32 box_rows) {
  return emulator::encode({reinterpret_cast<u8*>(array.data()),
                           {2, 128, 128 * kRows, 128 * kRows},
                           {64, kRows, 1, 1},
                           box_rows});
}

// What the emulator says of a run with the fault.
std::string complaint(const Plant& fault, u32 seed = 1) {
  Arrays arrays;
  u32 next_block = 0;
  ForwardArguments arguments{};
  arguments.maps = {map_of(arrays.q, 64), map_of(arrays.k, kConfig.kv_rows),
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
  plant = fault;
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

constexpr Shared::KvState stage(u32 buffer) { return {buffer, 0}; }

TEST(HopperFaults, NoneIsNone) { EXPECT_EQ(complaint({}), "nothing"); }

TEST(HopperFaults, Fences) {
  EXPECT_THAT(complaint({Fault::kProxyFence}),
              AllOf(HasSubstr("forward_sm90: block 0, warp "), HasSubstr(".cuh:"),
                    HasSubstr("missing fence.proxy.async: a tensor store of warp "),
                    HasSubstr(" reads sO[")));
  EXPECT_THAT(complaint({Fault::kInitFence}), HasSubstr("missing fence.mbarrier_init"));
  EXPECT_THAT(complaint({Fault::kProductFence}), HasSubstr("missing wgmma.fence"));
}

TEST(HopperFaults, Waits) {
  EXPECT_THAT(complaint({Fault::kProductWait}),
              HasSubstr(" of an accumulator before wgmma.wait_group has covered its product"));
  EXPECT_THAT(complaint({Fault::kStoreWait}), HasSubstr("ends before its tensor stores have"));
  EXPECT_THAT(complaint({Fault::kWarpSync}), AllOf(HasSubstr("race: "), HasSubstr(" work_tiles[")));
}

// Too early where the data is not there yet; where it is, for a phase two behind.
TEST(HopperFaults, SwappedPhase) {
  i32 num_late = 0;
  for (u32 seed = 1; seed <= 8; ++seed) {
    const std::string said = complaint({Fault::kParity, kShared.k().full(stage(0))}, seed);
    const bool late = said.find("two behind") != std::string::npos;
    num_late += late;
    EXPECT_THAT(said, late ? HasSubstr("waits for phase -1 of the mbarrier at shared address ")
                           : HasSubstr(" sK[0], byte "));
  }
  EXPECT_GT(num_late, 0);
  EXPECT_THAT(complaint({Fault::kParity, kShared.k().empty(stage(0))}), HasSubstr("deadlock"));
}

TEST(HopperFaults, WrongBarrier) {
  EXPECT_THAT(
      complaint({Fault::kArrival, kShared.k().empty(stage(0)), kShared.k().empty(stage(1))}),
      HasSubstr(" arrivals"));
  EXPECT_THAT(complaint({Fault::kBytes, kShared.v().full(stage(1))}),
              AllOf(HasSubstr("deadlock"), HasSubstr("and 16 bytes")));
}

TEST(HopperFaults, OneStageTooFew) {
  const u32 first = kShared.k().address(stage(0));
  EXPECT_THAT(complaint({Fault::kStage, first + kStageBytes, first}),
              AllOf(HasSubstr("race: a copy to the mbarrier at shared address "),
                    HasSubstr(" writes sK[0], byte 0")));
}

TEST(HopperFaults, WrongSwizzle) {
  EXPECT_THAT(complaint({Fault::kLayout, kShared.k().address(stage(0))}),
              AllOf(HasSubstr("wrong swizzle: "), HasSubstr("sK[0]")));
}

}  // namespace
}  // namespace fulmen::test
