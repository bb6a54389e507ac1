// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The pool: every slot once, several callers at once, after fork, with a caller's own parallel_for.

#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/error.h"

namespace fulmen::cpu {
namespace {

// How often each of `num_slots` slots ran.
std::vector<int> runs_of_slots(int num_slots) {
  std::vector<std::atomic<int>> counts(static_cast<size_t>(num_slots));
  parallel_for(
      num_slots,
      [](void* context, i64 slot) {
        (*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<size_t>(slot)] += 1;
      },
      &counts);
  return {counts.begin(), counts.end()};
}

TEST(ThreadPool, RunsEverySlotOnce) {
  for (const int num_slots : {0, 1, 2, 3, 7, 4, 16}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      EXPECT_EQ(runs_of_slots(num_slots), std::vector<int>(static_cast<size_t>(num_slots), 1));
    }
  }
}

TEST(ThreadPool, RunsEveryTaskOnceInRisingOrderOfClaims) {
  constexpr i64 kTasks = 10000;
  std::vector<std::atomic<int>> counts(kTasks);
  for_each_task(4, kTasks, [&](int, i64 task) { counts[static_cast<size_t>(task)] += 1; });
  for (const auto& count : counts) EXPECT_EQ(count, 1);
  std::vector<i64> order;
  for_each_task(1, 5, [&](int, i64 task) { order.push_back(task); });
  EXPECT_EQ(order, (std::vector<i64>{0, 1, 2, 3, 4}));
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        if (runs_of_slots(3) != std::vector<int>(3, 1)) wrong += 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

#if !defined(__SANITIZE_THREAD__)  // which does not support threads after fork
TEST(ThreadPool, WorksInAForkedChild) {
  ASSERT_EQ(runs_of_slots(3), std::vector<int>(3, 1));
  const pid_t child = fork();
  if (child == 0) _exit(runs_of_slots(3) == std::vector<int>(3, 1) ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(runs_of_slots(3), std::vector<int>(3, 1));
}
#endif

TEST(ThreadPool, CallsTheCallersParallelFor) {
  int calls = 0;
  set_parallel_for(
      [](i64 n, Body body, void* context, void* user) {
        *static_cast<int*>(user) += 1;
        for (i64 i = n; i-- > 0;) body(context, i);
      },
      6, &calls);
  EXPECT_EQ(num_threads(), 6);
  EXPECT_EQ(runs_of_slots(6), std::vector<int>(6, 1));
  EXPECT_EQ(calls, 1);
  set_parallel_for(nullptr, 0, nullptr);
  EXPECT_EQ(runs_of_slots(6), std::vector<int>(6, 1));
  EXPECT_EQ(calls, 1);
}

TEST(ThreadPool, TakesTheNumberOfThreadsThatIsSet) {
  const int by_default = num_threads();
  EXPECT_GE(by_default, 1);
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), by_default);
}

TEST(ThreadPool, RefusesWhatIsNoNumberOfThreads) {
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_THROW(set_num_threads(100000), Error);
  EXPECT_THROW(set_parallel_for([](i64, Body, void*, void*) {}, 0, nullptr), Error);
}

}  // namespace
}  // namespace fulmen::cpu
