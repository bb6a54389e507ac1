// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the checker says of kernels that order too little: right ones of a few lines, each with one
// barrier, wait or fence left out. On a GPU most of them would run right most of the time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "emulator/copies.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string complaint(const std::function<void()>& kernel,
                      emulator::GlobalMemory* memory = nullptr) {
  try {
    emulator::launch({.blocks = 1,
                      .threads = 128,
                      .shared_bytes = 8192,
                      .seed = 1,
                      .memory = memory,
                      .shared_arrays = {{"tile", 0, 4096, 128}}},
                     kernel);
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

u32 word(u32 index) { return ptx::dynamic_shared() + 4 * index; }
u32 thread() { return ptx::thread_index(); }

// Each thread reads what its neighbour wrote.
void pass_on(bool with_barrier) {
  ptx::store_shared(word(thread()), thread());
  if (with_barrier) ptx::block_sync();
  ptx::load_shared(word((thread() + 1) % 128));
}

TEST(Checker, MissingBlockSync) {
  EXPECT_EQ(complaint([] { pass_on(true); }), "nothing");
  EXPECT_THAT(complaint([] { pass_on(false); }),
              AllOf(HasSubstr("tile["), HasSubstr("checker_test.cpp")));
}

// The same through plain pointers, which only instrumentation sees.
void pass_on_by_pointer(bool with_barrier) {
  float* const shared = reinterpret_cast<float*>(ptx::shared_bytes());
  shared[thread()] = 1;
  if (with_barrier) ptx::block_sync();
  volatile float sink = shared[(thread() + 64) % 128];
  static_cast<void>(sink);
  if (with_barrier) ptx::block_sync();
  shared[127 - thread()] = 2.f + static_cast<float>(thread());
}

TEST(Checker, PlainPointers) {
  EXPECT_EQ(complaint([] { pass_on_by_pointer(true); }), "nothing");
  EXPECT_NE(complaint([] { pass_on_by_pointer(false); }), "nothing");
}

TEST(Checker, SameValueFromAllIsNoRace) {
  EXPECT_EQ(complaint([] { *reinterpret_cast<u32*>(ptx::shared_bytes()) = 1; }), "nothing");
  EXPECT_THAT(complaint([] { *reinterpret_cast<u32*>(ptx::shared_bytes()) = thread(); }),
              HasSubstr("race: writes tile[0], byte 0"));
}

TEST(Checker, ShufflesOrderNoMemory) {
  const auto kernel = [](bool ordered) {
    ptx::store_shared(word(thread()), 1);
    ptx::shuffle_xor(1u, 1);
    if (ordered) ptx::warp_sync();
    ptx::load_shared(word(thread() ^ 1));
  };
  EXPECT_EQ(complaint([&] { kernel(true); }), "nothing");
  EXPECT_THAT(complaint([&] { kernel(false); }), HasSubstr("race: "));
}

TEST(Checker, Uninitialised) {
  EXPECT_THAT(complaint([] { ptx::load_shared(word(5)); }),
              HasSubstr("uninitialised: reads tile[0], byte 20, which no thread wrote"));
}

struct Box {
  std::vector<u16> array = std::vector<u16>(64 * 8, 1);
  TensorMap map = emulator::encode(
      {reinterpret_cast<u8*>(array.data()), {2, 128, 1024, 1024}, {64, 8, 1, 1}, 8});
};

void load_box(const Box& box, bool init_fence, bool wait) {
  const u32 barrier = ptx::dynamic_shared() + 4096;
  if (thread() == 0) {
    ptx::mbarrier_init(barrier, 1);
    if (init_fence) ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(barrier, 1024);
    ptx::tma_load(ptx::dynamic_shared(), box.map, barrier, 0, 0, 0, 0);
  }
  ptx::block_sync();
  if (wait) ptx::mbarrier_wait(barrier, 0);
  ptx::load_shared(word(thread()));
}

TEST(Checker, TensorLoads) {
  const Box box;
  EXPECT_EQ(complaint([&] { load_box(box, true, true); }), "nothing");
  EXPECT_THAT(complaint([&] { load_box(box, false, true); }),
              HasSubstr("missing fence.mbarrier_init"));
  EXPECT_THAT(complaint([&] { load_box(box, true, false); }),
              AllOf(HasSubstr("race: reads tile["),
                    HasSubstr("which a copy to the mbarrier at shared address 5120 wrote")));
}

// A box where another one was read.
void load_box_twice(const Box& box, bool proxy_fence) {
  load_box(box, true, true);
  ptx::ldmatrix_x4(ptx::dynamic_shared() + thread() % 64 * 16);
  if (proxy_fence) ptx::fence_proxy_async();
  ptx::block_sync();
  const u32 barrier = ptx::dynamic_shared() + 4096;
  if (thread() == 0) {
    ptx::mbarrier_arrive_expect(barrier, 1024);
    ptx::tma_load(ptx::dynamic_shared(), box.map, barrier, 0, 0, 0, 0);
  }
  ptx::mbarrier_wait(barrier, 1);
}

TEST(Checker, LoadsUnderWayWhereACopyComes) {
  const Box box;
  EXPECT_EQ(complaint([&] { load_box_twice(box, true); }), "nothing");
  EXPECT_THAT(complaint([&] { load_box_twice(box, false); }),
              AllOf(HasSubstr("missing fence.proxy.async: a copy to the mbarrier at shared "
                              "address 5120 writes tile["),
                    HasSubstr("read at")));
}

void store_box(const Box& box, bool proxy_fence, bool wait) {
  for (u32 i = thread(); i < 256; i += 128) ptx::store_shared(word(i), 7);
  if (proxy_fence) ptx::fence_proxy_async();
  ptx::block_sync();
  if (thread() != 0) return;
  ptx::tma_store(box.map, ptx::dynamic_shared(), 0, 0, 0, 0);
  ptx::tma_store_commit();
  if (wait) ptx::tma_store_wait();
  ptx::store_shared(word(0), 8);
  ptx::tma_store_wait();
}

TEST(Checker, TensorStores) {
  const Box box;
  EXPECT_EQ(complaint([&] { store_box(box, true, true); }), "nothing");
  EXPECT_THAT(complaint([&] { store_box(box, false, true); }),
              HasSubstr("missing fence.proxy.async: a tensor store of warp 0, lane 0 reads tile["));
  EXPECT_THAT(
      complaint([&] { store_box(box, true, false); }),
      HasSubstr("race: writes tile[0], byte 0, which a tensor store of warp 0, lane 0 read"));
}

struct Fences {
  bool proxy = true;
  bool wgmma = true;
  bool wait = true;
};

void multiply(const Fences& fences) {
  for (u32 i = thread(); i < 2048; i += 128) ptx::store_shared(word(i), 0);
  if (fences.proxy) ptx::fence_proxy_async();
  ptx::block_sync();
  const u32 tile = ptx::wgmma_descriptor(ptx::dynamic_shared(), 16);
  float d[32] = {};
  if (fences.wgmma) ptx::wgmma_fence();
  ptx::wgmma_ss<DType::kBFloat16, false>(d, tile, tile, true);
  ptx::wgmma_commit();
  if (fences.wait) ptx::wgmma_wait<0>();
  d[3] += 1;
  ptx::wgmma_wait<0>();
}

TEST(Checker, Wgmma) {
  EXPECT_EQ(complaint([] { multiply({}); }), "nothing");
  EXPECT_THAT(complaint([] { multiply({.proxy = false}); }),
              HasSubstr("missing fence.proxy.async: wgmma of warpgroup 0 reads tile["));
  EXPECT_THAT(complaint([] { multiply({.wgmma = false}); }), HasSubstr("missing wgmma.fence"));
  EXPECT_THAT(complaint([] { multiply({.wait = false}); }),
              HasSubstr("register 3 of an accumulator before wgmma.wait_group"));
}

// 1 x 2 x 8 x 8 floats with a margin of 64 bytes around.
struct Numbers {
  std::vector<float> memory = std::vector<float>(160, 1.f);
  float* data = memory.data() + 16;

  emulator::GlobalMemory as(const std::string& name, bool output) const {
    return emulator::GlobalMemory({{.name = name,
                                    .data = data,
                                    .element_bytes = 4,
                                    .extents = {1, 2, 8, 8},
                                    .strides = {128, 64, 8, 1},
                                    .writable = output,
                                    .initialised = !output,
                                    .margin_bytes = 64}});
  }
};

TEST(Checker, GlobalArrays) {
  Numbers numbers;
  const auto read = [&](i32 index) {
    return [&numbers, index] {
      volatile float sink = numbers.data[index];
      static_cast<void>(sink);
    };
  };
  emulator::GlobalMemory input = numbers.as("q", false);
  EXPECT_EQ(complaint(read(127), &input), "nothing");
  EXPECT_THAT(complaint(read(128), &input), HasSubstr("q, 0 bytes behind its last"));
  EXPECT_THAT(complaint(read(-1), &input), HasSubstr("q, 4 bytes before its first"));
  EXPECT_THAT(complaint([&] { numbers.data[70] = 2; }, &input),
              HasSubstr("writes an input: q[0][1][0][6]"));
  emulator::GlobalMemory output = numbers.as("o", true);
  EXPECT_EQ(complaint([&] { numbers.data[thread()] = 2; }, &output), "nothing");
  emulator::GlobalMemory fresh = numbers.as("o", true);
  EXPECT_THAT(complaint(read(3), &fresh), HasSubstr("uninitialised: reads o[0][0][0][3]"));
  EXPECT_THAT(complaint([&] { numbers.data[0] += static_cast<float>(thread()); }, &output),
              HasSubstr("race: "));
}

// Atomic additions race with no other, unless their sums must come out the same every time: then
// blocks add one after the other, and wait for all threads of the one before.
TEST(Checker, AdditionsInOneOrder) {
  const auto said = [](bool ordered, bool waits, bool meets) {
    float sum = 0;
    u32 counter = 0;
    emulator::GlobalMemory memory(
        {{.name = "sums", .data = &sum, .element_bytes = 4, .writable = true, .ordered = ordered}});
    const emulator::Grid grid{.blocks = 3,
                              .threads = 64,
                              .shared_bytes = 0,
                              .seed = 1,
                              .together = true,
                              .memory = &memory};
    try {
      emulator::launch(grid, [&] {
        if (waits && thread() == 0) ptx::await(&counter, ptx::block_index());
        ptx::block_sync();
        if (thread() == 63) ptx::reduce_add(&sum, 1);
        if (meets) ptx::block_sync();
        if (thread() == 0) ptx::announce(&counter);
      });
    } catch (const emulator::Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_EQ(said(false, false, false), "nothing");
  EXPECT_EQ(said(true, true, true), "nothing");
  for (const bool meets : {false, true}) {
    EXPECT_THAT(said(true, !meets, meets), HasSubstr("race: adds to sums[0]"));
  }
}

// Programmatic dependent launch: what the launch before wrote is there for who has waited, and for
// who hears of that.
TEST(Checker, LaunchesThatOverlap) {
  Numbers numbers;
  const auto said = [&](u32 waiting, bool meets) {
    emulator::GlobalMemory memory = numbers.as("o", true);
    const emulator::Grid first{
        .blocks = 2, .threads = 64, .shared_bytes = 0, .seed = 1, .memory = &memory};
    emulator::Grid second = first;
    second.overlaps = true;
    try {
      emulator::launch(first, [&] { numbers.data[ptx::block_index() * 64 + thread()] = 1; });
      emulator::launch(second, [&] {
        if (ptx::thread_index() < waiting) ptx::grid_dependency_wait();
        if (meets) ptx::block_sync();
        volatile float sink = numbers.data[thread()];
        static_cast<void>(sink);
      });
    } catch (const emulator::Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_EQ(said(64, false), "nothing");
  EXPECT_EQ(said(1, true), "nothing");
  for (const bool meets : {false, true}) {
    EXPECT_THAT(said(0, meets),
                AllOf(HasSubstr("race: reads o["), HasSubstr("which a launch before wrote at ")));
  }
  EXPECT_THAT(said(1, false), HasSubstr("which a launch before wrote at "));
}

// Three in a row: the first is over when the third begins if the second waited before it let the
// third begin, but not the second.
TEST(Checker, LaunchesInARow) {
  Numbers numbers;
  const auto said = [&](bool waits, i32 from) {
    emulator::GlobalMemory memory = numbers.as("o", true);
    emulator::Grid grid{
        .blocks = 1, .threads = 32, .shared_bytes = 0, .seed = 1, .memory = &memory};
    try {
      emulator::launch(grid, [&] { numbers.data[thread()] = 1; });
      grid.overlaps = true;
      emulator::launch(grid, [&] {
        if (waits) ptx::grid_dependency_wait();
        ptx::grid_dependents_launch();
        numbers.data[32 + thread()] = 2;
      });
      emulator::launch(grid, [&] {
        volatile float sink = numbers.data[from + thread()];
        static_cast<void>(sink);
      });
    } catch (const emulator::Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_EQ(said(true, 0), "nothing");
  EXPECT_THAT(said(false, 0), HasSubstr("which a launch before wrote at "));
  EXPECT_THAT(said(true, 32), HasSubstr("which a launch before wrote at "));
}

TEST(Checker, CountsBankConflicts) {
  emulator::Counters counters;
  emulator::launch(
      {.blocks = 1, .threads = 32, .shared_bytes = 4096, .seed = 1, .counters = &counters},
      [] { ptx::store_shared(word(thread() * 4), 1); });
  ASSERT_EQ(counters.shared.size(), 1u);
  const auto& site = counters.shared.begin()->second;
  EXPECT_EQ(site.accesses, 1u);
  EXPECT_EQ(site.wavefronts, 4u);
  EXPECT_EQ(site.conflicts(), 3u);
}

}  // namespace
}  // namespace fulmen::test
