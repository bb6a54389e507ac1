// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The pool: every slot once, several callers at once, after fork, with a caller's own parallel_for.

#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace fulmen::cpu {
namespace {

namespace fs = std::filesystem;

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

// What `body` returns in a child process, whose affinity and environment are its own.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void run_on(int num_processors) {
  cpu_set_t all, few;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  CPU_ZERO(&few);
  for (int cpu = 0; CPU_COUNT(&few) < num_processors && cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &few);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(few), &few), 0);
}

TEST(DefaultNumThreads, IsThatOfTheAffinityMask) {
  EXPECT_EQ(
      in_child([] { return unsetenv("FULMEN_NUM_THREADS"), run_on(1), default_num_threads(); }), 1);
}

TEST(DefaultNumThreads, WhatIsAskedForWins) {
  EXPECT_EQ(in_child([] {
              setenv("FULMEN_NUM_THREADS", "3", 1);
              run_on(1);
              return default_num_threads();
            }),
            3);
  EXPECT_EQ(in_child([] { return run_on(1), set_num_threads(5), num_threads(); }), 5);
}

// Files under a root of their own, as /proc and /sys would have them.
class ControlGroup : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_ + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  // On a machine with at least as many processors; tests of this class ask for few.
  int processors() const { return usable_processors(root_); }
  int all() const { return usable_processors(root_ + "/none"); }
  void TearDown() override { fs::remove_all(root_); }

  const std::string root_ = testing::TempDir() + "/fulmen-cgroup-" + std::to_string(getpid());
};

TEST_F(ControlGroup, QuotasOfVersion2RoundUp) {
  write("/proc/self/cgroup", "0::/user.slice/job\n");
  write("/sys/fs/cgroup/user.slice/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(processors(), 1);
  write("/sys/fs/cgroup/user.slice/job/cpu.max", "110000 100000\n");
  EXPECT_EQ(processors(), std::min(2, all()));
  write("/sys/fs/cgroup/user.slice/job/cpu.max", "max 100000\n");
  EXPECT_EQ(processors(), all());
  write("/sys/fs/cgroup/user.slice/cpu.max", "100000 100000\n");  // the group above counts too
  EXPECT_EQ(processors(), 1);
}

TEST_F(ControlGroup, QuotasOfVersion1) {
  write("/proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/docker/1f\n0::/other\n");
  const std::string folder = "/sys/fs/cgroup/cpu,cpuacct";
  write(folder + "/docker/1f/cpu.cfs_period_us", "100000\n");
  write(folder + "/docker/1f/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(processors(), all());
  write(folder + "/docker/1f/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(processors(), 1);
  fs::remove_all(root_ + folder + "/docker");  // as a container sees it: its own group is the top
  EXPECT_EQ(processors(), all());
  write(folder + "/cpu.cfs_period_us", "100000\n");
  write(folder + "/cpu.cfs_quota_us", "20000\n");
  EXPECT_EQ(processors(), 1);
}

TEST_F(ControlGroup, WhatIsNoQuotaIsNoLimit) {
  for (const char* text : {"", "nonsense", "0::", "0::relative", ":", "0::/job\n"}) {
    write("/proc/self/cgroup", text);
    EXPECT_EQ(processors(), all()) << text;
  }
  for (const char* text : {"", "max", "x y", "100000", "100000 0"}) {
    write("/sys/fs/cgroup/job/cpu.max", text);
    EXPECT_EQ(processors(), all()) << text;
  }
}

TEST(ThreadPool, RefusesWhatIsNoNumberOfThreads) {
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_THROW(set_num_threads(100000), Error);
  EXPECT_THROW(set_parallel_for([](i64, Body, void*, void*) {}, 0, nullptr), Error);
}

}  // namespace
}  // namespace fulmen::cpu
