// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the emulator says of kernels that are wrong: small ones with one fault each, every one of
// which would hang or read rubbish on a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "emulator/copies.h"
#include "emulator/launch.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// What the emulator says of a block of 128 threads.
std::string complaint(i32 shared_bytes, const std::function<void()>& kernel, u32 seed = 1) {
  try {
    emulator::launch({.blocks = 1, .threads = 128, .shared_bytes = shared_bytes, .seed = seed},
                     kernel);
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

std::string complaint(const std::function<void()>& kernel, u32 seed = 1) {
  return complaint(4096, kernel, seed);
}

// 8 rows of 64.
TensorMap map_of(std::vector<u16>& array) {
  return emulator::encode(
      {reinterpret_cast<u8*>(array.data()), {2, 128, 1024, 1024}, {64, 8, 1, 1}, 8});
}

// Every thread writes its part of the first `bytes` bytes for all to read, engines included.
void fill_shared(u32 bytes) {
  for (u32 b = 4 * ptx::thread_index(); b < bytes; b += 4 * 128) {
    ptx::store_shared(ptx::dynamic_shared() + b, 0);
  }
  ptx::fence_proxy_async();
  ptx::block_sync();
}

TEST(Misuse, RightKernelsPass) {
  EXPECT_EQ(complaint([] {
              ptx::store_shared(ptx::dynamic_shared() + 4 * ptx::thread_index(), 7);
              ptx::block_sync();
            }),
            "nothing");
}

TEST(Misuse, DeadlockSaysWhoWaitsForWhom) {
  const std::string said = complaint([] {
    const u32 barrier = ptx::dynamic_shared();
    if (ptx::thread_index() == 0) ptx::mbarrier_init(barrier, 2);
    ptx::block_sync();
    if (ptx::thread_index() == 32) ptx::mbarrier_arrive(barrier);
    if (ptx::thread_index() / 32 == 0) ptx::mbarrier_wait(barrier, 0);
    if (ptx::thread_index() / 32 == 3) ptx::bar_sync(5, 64);
  });
  EXPECT_THAT(said, HasSubstr("block 0: deadlock"));
  EXPECT_THAT(said, HasSubstr("warp 0, 32 lanes in mbarrier.try_wait at shared address 1024, "
                              "parity 0: phase 0 lacks 1 of 2 arrivals and 0 bytes; so far it was "
                              "reached by warps 1"));
  EXPECT_THAT(said, HasSubstr("warp 3, 32 lanes in barrier 5: 32 of 64 threads have come, from "
                              "warps 3"));
}

TEST(Misuse, DivergedWarpIsADeadlock) {
  EXPECT_THAT(complaint([] {
                if (ptx::thread_index() != 40) ptx::warp_sync();
              }),
              HasSubstr("warp 1, 31 lanes in bar.warp.sync: 31 of 32 threads have come"));
}

TEST(Misuse, MixedInstructionsOfAWarp) {
  EXPECT_THAT(complaint([] {
                if (ptx::thread_index() % 2 == 0) ptx::warp_sync();
                if (ptx::thread_index() % 2 == 1) ptx::broadcast(1);
              }),
              AllOf(HasSubstr("shfl.idx"), HasSubstr("bar.warp.sync")));
}

TEST(Misuse, SharedMemoryOutOfRangeOrMisaligned) {
  EXPECT_THAT(complaint([] { ptx::load_shared(ptx::dynamic_shared() + 4096); }),
              HasSubstr("4 bytes at shared address 5120"));
  EXPECT_THAT(complaint([] { ptx::load_shared(0); }), HasSubstr("shared address 0"));
  EXPECT_THAT(complaint([] { ptx::load_shared_x4(ptx::dynamic_shared() + 8); }),
              HasSubstr("is not a multiple of 16"));
}

TEST(Misuse, Mbarriers) {
  EXPECT_THAT(complaint([] { ptx::mbarrier_arrive(ptx::dynamic_shared()); }),
              HasSubstr("no mbarrier was made at shared address 1024"));
  EXPECT_THAT(complaint([] {
                const u32 barrier = ptx::dynamic_shared();
                if (ptx::thread_index() != 0) return;
                ptx::mbarrier_init(barrier, 1);
                ptx::mbarrier_arrive_expect(barrier, 64);
                ptx::mbarrier_arrive(barrier);
              }),
              HasSubstr("more than 1 arrivals in one phase"));
}

// Whether the waiting warp comes before the second arrival, between both or late is the schedule's.
TEST(Misuse, WaitForAPhaseTwoBehind) {
  constexpr const char* kLate =
      "waits for phase 0 of the mbarrier at shared address 1024, which is two behind: phase 2 has "
      "begun, and parity 0 no longer means that";
  const auto said = [](u32 seed, bool heeded) {
    return complaint(
        [=] {
          const u32 barrier = ptx::dynamic_shared();
          if (ptx::thread_index() == 0) ptx::mbarrier_init(barrier, 1);
          ptx::block_sync();
          if (ptx::thread_index() == 0) ptx::mbarrier_arrive(barrier);
          if (ptx::thread_index() / 32 == 1) ptx::mbarrier_wait(barrier, 0);
          if (heeded) ptx::block_sync();
          if (ptx::thread_index() == 0) ptx::mbarrier_arrive(barrier);
        },
        seed);
  };
  bool found = false;
  for (u32 seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(said(seed, true), "nothing");
    const std::string rash = said(seed, false);
    EXPECT_THAT(rash, AnyOf("nothing", HasSubstr(kLate)));
    found |= rash != "nothing";
  }
  EXPECT_TRUE(found);
}

TEST(Misuse, NamedBarrierForDifferentNumbersOfThreads) {
  EXPECT_THAT(complaint([] { ptx::bar_sync(1, ptx::thread_index() < 64 ? 128 : 96); }),
              HasSubstr("threads, others are at"));
}

TEST(Misuse, ThreadEndsBeforeItsStores) {
  std::vector<u16> array(64 * 8);
  const TensorMap map = map_of(array);
  EXPECT_THAT(complaint([&] {
                if (ptx::thread_index() != 0) return;
                for (u32 b = 0; b < 1024; b += 4) ptx::store_shared(ptx::dynamic_shared() + b, 0);
                ptx::fence_proxy_async();
                ptx::tma_store(map, ptx::dynamic_shared(), 0, 0, 0, 0);
                ptx::tma_store_commit();
              }),
              HasSubstr("ends before its tensor stores"));
}

TEST(Misuse, BytesThatDoNotAddUp) {
  std::vector<u16> array(64 * 8);
  const TensorMap map = map_of(array);
  EXPECT_THAT(complaint([&] {
                if (ptx::thread_index() != 0) return;
                const u32 barrier = ptx::dynamic_shared() + 2048;
                ptx::mbarrier_init(barrier, 1);
                ptx::fence_mbarrier_init();
                ptx::mbarrier_arrive_expect(barrier, 2048);
                ptx::tma_load(ptx::dynamic_shared(), map, barrier, 0, 0, 0, 0);
                ptx::mbarrier_wait(barrier, 0);
              }),
              HasSubstr("lacks 0 of 1 arrivals and 1024 bytes"));
}

// Of 384 threads each has 168 registers at first, or as many as the largest setmaxnreg.inc names.
std::string complaint_of_registers(const std::function<void(u32 warpgroup)>& kernel) {
  try {
    emulator::launch({.blocks = 1, .threads = 384, .shared_bytes = 1024},
                     [&] { kernel(ptx::thread_index() / 128); });
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(Misuse, RegistersThatWarpgroupsHandOver) {
  EXPECT_EQ(complaint_of_registers([](u32 warpgroup) {
              if (warpgroup == 0) ptx::setmaxnreg_dec<24>();
              if (warpgroup != 0) ptx::setmaxnreg_inc<240>();
            }),
            "nothing");
  EXPECT_EQ(complaint_of_registers([](u32) { ptx::setmaxnreg_inc<160>(); }), "nothing");
  EXPECT_THAT(complaint_of_registers([](u32 warpgroup) {
                if (warpgroup == 0) ptx::setmaxnreg_inc<160>();
                if (warpgroup == 1) ptx::setmaxnreg_inc<240>();
              }),
              HasSubstr("setmaxnreg.inc to 160 registers, an illegal instruction where a thread "
                        "has 168 at launch"));
  EXPECT_THAT(complaint_of_registers([](u32) { ptx::setmaxnreg_dec<176>(); }),
              HasSubstr("setmaxnreg.dec to 176 registers, an illegal instruction where a thread "
                        "has 168 at launch"));
}

TEST(Misuse, WarpgroupThatDisagreesOnItsProduct) {
  EXPECT_THAT(complaint(8192,
                        [] {
                          float d[32] = {};
                          fill_shared(8192);
                          const u32 tile = ptx::wgmma_descriptor(ptx::dynamic_shared(), 16);
                          ptx::wgmma_fence();
                          ptx::wgmma_ss<DType::kBFloat16, false>(d, tile, tile,
                                                                 ptx::thread_index() < 64);
                          ptx::wgmma_commit();
                          ptx::wgmma_wait<0>();
                        }),
              HasSubstr("issued different wgmma"));
}

}  // namespace
}  // namespace fulmen::test
