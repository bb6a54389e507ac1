// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Clusters of thread blocks: every instruction of clusters in a kernel that is
// right, in several schedules, and what is said of each with one barrier, wait, fence or scope left
// out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "emulator/copies.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr u32 kBarrierAt = 2048;  // behind the tile
constexpr u32 kInboxAt = 1024;

std::string complaint(const std::function<void()>& kernel, i32 cluster = 2, u32 seed = 1,
                      emulator::Counters* counters = nullptr) {
  try {
    emulator::launch({.blocks = 2 * cluster,
                      .threads = 64,
                      .shared_bytes = 4096,
                      .seed = seed,
                      .shared_arrays = {{"tile", 0, 1024, 128}, {"inbox", kInboxAt, 1024, 128}},
                      .counters = counters,
                      .cluster_size = cluster},
                     kernel);
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "nothing";
}

void expect_right(const std::function<void()>& kernel, i32 cluster = 2) {
  for (u32 seed = 1; seed <= 10; ++seed) EXPECT_EQ(complaint(kernel, cluster, seed), "nothing");
}

// In every schedule.
void expect_finding(const std::function<void()>& kernel,
                    const ::testing::Matcher<std::string>& said, i32 cluster = 2) {
  for (u32 seed = 1; seed <= 10; ++seed) EXPECT_THAT(complaint(kernel, cluster, seed), said);
}

u32 thread() { return ptx::thread_index(); }
u32 rank() { return ptx::cluster_rank(); }
u32 word(u32 index) { return ptx::dynamic_shared() + 4 * index; }
u32 inbox(u32 index) { return word(kInboxAt / 4 + index); }
u32 barrier() { return ptx::dynamic_shared() + kBarrierAt; }
u32 next_rank() { return (rank() + 1) % ptx::cluster_size(); }
u32 of_next(u32 address) { return ptx::map_shared(address, next_rank()); }
void expect_equal(u32 found, u32 expected) {
  if (found != expected) throw emulator::Error("another value than expected");
}

TEST(Cluster, RanksAndPlaces) {
  for (const i32 size : {1, 3, 8}) {
    expect_right(
        [&] {
          expect_equal(ptx::cluster_size(), static_cast<u32>(size));
          expect_equal(rank(), ptx::block_index() % static_cast<u32>(size));
          expect_equal(ptx::num_blocks(), static_cast<u32>(2 * size));
          ptx::cluster_sync();
          ptx::store_cluster(ptx::map_shared(word(thread()), rank()), 5);  // its own
          expect_equal(ptx::load_shared(word(thread())), 5);
          expect_equal(ptx::load_cluster(word(thread())), 5);
        },
        size);
  }
}

TEST(Cluster, GridsThatAreNone) {
  EXPECT_THAT(complaint([] {}, 17), HasSubstr("34 blocks in clusters of 17; 1 to 16 that divide"));
  EXPECT_THROW(
      emulator::launch(
          {.blocks = 3, .threads = 32, .shared_bytes = 0, .seed = 1, .cluster_size = 2}, [] {}),
      emulator::Error);
}

struct Steps {
  bool begins = true;    // a barrier of the cluster before anything is reached
  bool released = true;  // the barrier before what was written is read has an order
  bool meets = true;     // there is one
  bool ends = true;      // nobody ends before all have read
};

// Each block reads what the next one wrote.
void read_next(const Steps& steps) {
  ptx::store_shared(word(thread()), 100 * rank() + thread());
  if (steps.meets) {
    steps.released ? ptx::cluster_arrive() : ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  const u32 read = ptx::load_cluster(of_next(word(63 - thread())));
  expect_equal(read, 100 * next_rank() + 63 - thread());
  if (steps.ends) ptx::cluster_sync();
}

TEST(Cluster, RemoteLoads) {
  for (const i32 size : {2, 5}) expect_right([] { read_next({}); }, size);
  expect_finding([] { read_next({.meets = false}); },
                 HasSubstr("which may not have begun: no barrier of the cluster came before"));
  expect_finding([] { read_next({.released = false}); },
                 AllOf(HasSubstr("race: reads tile["), HasSubstr(" of block "),
                       HasSubstr("wrote at cluster_test.cpp"), HasSubstr("at cluster_test.cpp")));
  expect_finding([] { read_next({.ends = false}); },
                 AnyOf(HasSubstr("the block may end before block "), HasSubstr("which has ended")));
}

// Each block writes into the next one, 16 bytes a thread.
void write_next(const Steps& steps) {
  if (steps.begins) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  if (thread() < 16) {
    ptx::store_cluster_x4(of_next(word(4 * thread())), {{rank(), thread(), 7, 8}});
  }
  if (steps.meets) {
    steps.released ? ptx::cluster_arrive() : ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  if (thread() >= 16) return;
  const ptx::U32x4 x = ptx::load_shared_x4(word(4 * thread()));
  expect_equal(x.word[0], (rank() + ptx::cluster_size() - 1) % ptx::cluster_size());
  expect_equal(x.word[1], thread());
}

TEST(Cluster, RemoteStores) {
  for (const i32 size : {2, 5}) expect_right([] { write_next({}); }, size);
  expect_finding([] { write_next({.begins = false}); }, HasSubstr("which may not have begun"));
  expect_finding([] { write_next({.released = false}); },
                 AllOf(HasSubstr("race: "), HasSubstr("without a barrier or wait in between")));
  expect_finding([] { write_next({.meets = false}); },
                 AnyOf(HasSubstr("race: "), HasSubstr("uninitialised: "), HasSubstr("may end"),
                       HasSubstr("has ended")));
}

TEST(Cluster, OverwritesWhatIsStillRead) {
  const auto kernel = [](bool waits) {
    read_next({.ends = waits});
    ptx::store_shared(word(thread()), 0);
    ptx::cluster_sync();
  };
  expect_right([&] { kernel(true); });
  expect_finding([&] { kernel(false); }, AllOf(HasSubstr("race: "), HasSubstr("tile[")));
}

TEST(Cluster, PlainLoadsReachNoOtherBlock) {
  EXPECT_THAT(complaint([] {
                ptx::cluster_sync();
                ptx::load_shared(of_next(word(0)));
              }),
              HasSubstr("it is of shared::cluster"));
  EXPECT_THAT(complaint([] { ptx::map_shared(word(0), 2); }),
              HasSubstr("mapa to block 2 of a cluster of 2"));
  EXPECT_THAT(complaint([] {
                ptx::cluster_sync();
                ptx::load_cluster(of_next(word(1023)) + 4);
              }),
              HasSubstr("4 bytes at shared address 5120"));
}

TEST(Cluster, BarrierMisused) {
  EXPECT_THAT(complaint([] { ptx::cluster_wait(); }), HasSubstr("the thread has not arrived"));
  EXPECT_THAT(complaint([] {
                ptx::cluster_arrive();
                ptx::cluster_arrive();
              }),
              HasSubstr("the thread has not waited since it arrived"));
  EXPECT_THAT(complaint([] {
                if (rank() == 0 || thread() < 32) {
                  ptx::cluster_sync();
                } else {
                  ptx::bar_sync(3, 64);
                }
              }),
              AllOf(HasSubstr("deadlock"), HasSubstr("block 1, warp 1, 32 lanes in barrier 3"),
                    HasSubstr("barrier.cluster.wait: 32 of 128 running threads have not arrived")));
}

// Threads that have ended need not come.
TEST(Cluster, BarrierWithoutThoseThatEnded) {
  expect_right([] {
    if (rank() == 1 && thread() < 32) return;
    ptx::cluster_sync();
    ptx::cluster_sync();
  });
}

enum class Send { kStore, kStoreAsync, kStoreAsyncX4, kBulk };

struct Messages {
  Send send = Send::kStore;
  bool init_fence = true;
  bool proxy_fence = true;
  bool cluster_scope = true;
  bool waits = true;
  bool expects_early = true;  // by the receiver; else by the sender
};

// Every block sends 64 words to the next one and waits for those of the one before.
void send_next(const Messages& m) {
  const bool counts_bytes = m.send != Send::kStore;
  if (thread() == 0) {
    ptx::mbarrier_init(barrier(), counts_bytes ? 1 : 64);
    if (m.init_fence) ptx::fence_mbarrier_init();
    if (counts_bytes && m.expects_early) ptx::mbarrier_arrive_expect(barrier(), 256);
  }
  ptx::store_shared(word(thread()), 1000 * rank() + thread());
  if (m.proxy_fence) ptx::fence_proxy_async();
  ptx::block_sync();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  const u32 to = of_next(inbox(thread())), full = of_next(barrier());
  if (counts_bytes && !m.expects_early && thread() == 0) {
    ptx::mbarrier_arrive_expect_cluster(full, 256);
  }
  if (m.send == Send::kStore) {
    ptx::store_cluster(to, 1000 * rank() + thread());
    ptx::mbarrier_arrive_cluster(full);
  } else if (m.send == Send::kStoreAsync) {
    ptx::store_async(to, 1000 * rank() + thread(), full);
  } else if (m.send == Send::kStoreAsyncX4) {
    const u32 first = 1000 * rank() + thread();
    if (thread() % 4 == 0) {
      ptx::store_async_x4(to, {{first, first + 1, first + 2, first + 3}}, full);
    }
  } else if (thread() == 0) {
    ptx::bulk_store_cluster(to, word(0), 256, full);
  }
  if (!m.waits) return;
  m.cluster_scope ? ptx::mbarrier_wait_cluster(barrier(), 0) : ptx::mbarrier_wait(barrier(), 0);
  const u32 size = ptx::cluster_size();
  expect_equal(ptx::load_shared(inbox(63 - thread())),
               1000 * ((rank() + size - 1) % size) + 63 - thread());
  ptx::cluster_sync();  // a source was read
}

TEST(Cluster, Messages) {
  for (const Send send : {Send::kStore, Send::kStoreAsync, Send::kStoreAsyncX4, Send::kBulk}) {
    for (const bool early : {true, false}) {
      for (const i32 size : {2, 4}) {
        expect_right([&] { send_next({.send = send, .expects_early = early}); }, size);
      }
    }
    expect_finding([&] { send_next({.send = send, .cluster_scope = false}); },
                   AllOf(HasSubstr("race: reads inbox["), HasSubstr("wrote at cluster_test.cpp")));
    expect_finding([&] { send_next({.send = send, .waits = false}); },
                   AnyOf(HasSubstr("may end before"), HasSubstr("which has ended"),
                         HasSubstr("has ended with copies still running")));
    expect_finding([&] { send_next({.send = send, .init_fence = false}); },
                   AnyOf(HasSubstr("missing fence.mbarrier_init"),
                         HasSubstr("race: adds to shared byte 2048 of block ")));
  }
  expect_finding([] { send_next({.send = Send::kBulk, .proxy_fence = false}); },
                 HasSubstr("missing fence.proxy.async: a copy to the mbarrier at shared address"));
}

TEST(Cluster, CopiesAndBarriersOfOneBlock) {
  EXPECT_THAT(complaint([] {
                if (thread() == 0) ptx::mbarrier_init(barrier(), 1);
                if (thread() == 0) ptx::fence_mbarrier_init();
                ptx::cluster_sync();
                ptx::store_async(of_next(inbox(thread())), 1, barrier());
              }),
              HasSubstr("a copy to one block counts towards a barrier of another"));
}

// The source of a bulk copy is free once the receiver has said that it landed.
TEST(Cluster, SourceOfABulkCopyIsOverwritten) {
  expect_finding(
      [] {
        if (thread() == 0) {
          ptx::mbarrier_init(barrier(), 1);
          ptx::fence_mbarrier_init();
          ptx::mbarrier_arrive_expect(barrier(), 256);
        }
        ptx::store_shared(word(thread()), 1);
        ptx::fence_proxy_async();
        ptx::cluster_sync();
        if (thread() == 0)
          ptx::bulk_store_cluster(of_next(inbox(0)), word(0), 256, of_next(barrier()));
        ptx::mbarrier_wait_cluster(barrier(), 0);  // another copy's
        ptx::store_shared(word(thread()), 2);
        ptx::cluster_sync();
      },
      AllOf(HasSubstr("race: "), HasSubstr("tile["),
            HasSubstr("a copy to the mbarrier at shared address 3072 of block ")));
}

// 8 rows of 64, for both blocks of a cluster, asked for by the first.
void load_for_all(const TensorMap& map, u32 ranks, bool waits) {
  if (thread() == 0) {
    ptx::mbarrier_init(barrier(), 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(barrier(), 1024);
  }
  ptx::cluster_sync();
  if (rank() == 0 && thread() == 0) {
    ptx::tma_load_multicast(ptx::dynamic_shared(), map, barrier(), 0, 0, 0, 0, ranks);
  }
  if (waits) ptx::mbarrier_wait_cluster(barrier(), 0);
  expect_equal(ptx::load_shared(word(0)), 0x00010001);
}

TEST(Cluster, Multicast) {
  std::vector<u16> array(64 * 8, 1);
  const TensorMap map = emulator::encode(
      {reinterpret_cast<u8*>(array.data()), {2, 128, 1024, 1024}, {64, 8, 1, 1}, 8});
  expect_right([&] { load_for_all(map, 3, true); });
  expect_finding([&] { load_for_all(map, 1, true); },
                 AllOf(HasSubstr("deadlock"), HasSubstr("lacks 0 of 1 arrivals and 1024 bytes")));
  expect_finding([&] { load_for_all(map, 3, false); },
                 AnyOf(HasSubstr("race: "), HasSubstr("uninitialised: ")));
  EXPECT_THAT(complaint([&] { load_for_all(map, 5, true); }),
              HasSubstr("multicast to blocks of bits 5, of a cluster of 2"));
}

TEST(Cluster, CountsBytesOfTheNetwork) {
  emulator::Counters counters;
  EXPECT_EQ(complaint([] { read_next({}); }, 2, 1, &counters), "nothing");
  EXPECT_EQ(counters.cluster_loaded_bytes, 4 * 64 * 4u);  // of four blocks
  EXPECT_EQ(counters.cluster_stored_bytes, 0u);
  EXPECT_EQ(complaint([] { send_next({.send = Send::kBulk}); }, 2, 1, &counters), "nothing");
  EXPECT_EQ(counters.cluster_stored_bytes, 4 * 256u);
}

}  // namespace
}  // namespace fulmen::test
