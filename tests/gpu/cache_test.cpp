// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel cache under everything that happens to folders and processes.
#include "gpu/jit/cache.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#include "cache_support.h"
#include "gpu/jit/cache_file.h"

namespace fulmen::gpu {
namespace {

TEST_F(KernelCacheTest, BuildsOnceInMemoryAndOnDisk) {
  KernelCache cache({folder_.path(), kLimit});
  int builds = 0;
  const auto build = [&] { return ++builds, kernel_of("x"); };
  EXPECT_EQ(cache.get(key_of("k"), build), cache.get(key_of("k"), build));
  EXPECT_EQ(KernelCache({folder_.path(), kLimit}).get(key_of("k"), build)->log, "log of x");
  EXPECT_EQ(builds, 1);
  EXPECT_EQ(cache.note(), "");
  ASSERT_EQ(entries().size(), 1u);
  EXPECT_EQ(entries()[0].filename().string().rfind("k-sm_90a-", 0), 0u);
}

TEST_F(KernelCacheTest, AFailedBuildIsTriedAgain) {
  KernelCache cache({folder_.path(), kLimit});
  expect_error(Status::kCompile, {"no"}, [&] {
    cache.get(key_of("k"), []() -> CompiledKernel { throw Error(Status::kCompile, "no"); });
  });
  EXPECT_EQ(cache.get(key_of("k"), [] { return kernel_of("y"); })->cubin, "y");
}

TEST(KernelKey, DependsOnEverythingThatTheCodeDependsOn) {
  const KernelKey key = kernel_key(small_spec("k"), "sm_90a", 13000);
  EXPECT_EQ(key.digest, kernel_key(small_spec("k"), "sm_90a", 13000).digest);
  EXPECT_NE(key.digest, kernel_key(small_spec("k"), "sm_90a", 12090).digest);
  EXPECT_NE(key.digest, kernel_key(small_spec("k"), "sm_80", 13000).digest);
  KernelSpec other = small_spec("k");
  other.config[1].value = "16";
  EXPECT_NE(key.digest, kernel_key(other, "sm_90a", 13000).digest);
  other = small_spec("k");
  other.include = "kernels/attention/block_range.cuh";
  EXPECT_NE(key.digest, kernel_key(other, "sm_90a", 13000).digest);
}

TEST_F(KernelCacheTest, DamagedEntriesAreBuiltAgain) {
  get("k");
  const std::string whole = bytes_of_entry();
  const auto damage = [&](const std::string& bytes) {
    std::ofstream(entries().at(0), std::ios::binary | std::ios::trunc) << bytes;
    bool built = false;
    EXPECT_EQ(get("k", &built), "code of k");
    EXPECT_TRUE(built);
    EXPECT_EQ(bytes_of_entry(), whole);  // and mended
  };
  for (std::size_t size = 0; size < whole.size(); ++size) damage(whole.substr(0, size));
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    damage(flipped);
  }
  damage(whole + "x");
}

TEST_F(KernelCacheTest, AReadOnlyFolderLeavesMemory) {
  fs::permissions(folder_.path(), static_cast<fs::perms>(0555));
  EXPECT_TRUE(holds_in_child([&] {
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) return false;  // root may write everywhere
    KernelCache cache({folder_.path(), kLimit});
    const bool right = cache.get(key_of("k"), [] { return kernel_of("x"); })->cubin == "x";
    return right && cache.note().find("could not be written") != std::string::npos;
  }));
  EXPECT_TRUE(entries().empty());
}

TEST_F(KernelCacheTest, AFolderThatCannotBeMadeLeavesMemory) {
  std::ofstream(folder_.path() + "/file") << "in the way";
  KernelCache cache({folder_.path() + "/file/cache", kLimit});
  int builds = 0;
  const auto build = [&] { return ++builds, kernel_of("x"); };
  EXPECT_EQ(cache.get(key_of("k"), build)->cubin, "x");
  EXPECT_EQ(cache.get(key_of("k"), build)->cubin, "x");
  EXPECT_EQ(builds, 1);
  EXPECT_NE(cache.note().find("in memory only"), std::string::npos) << cache.note();
}

// A full disk, played by the limit on file sizes: in a child, since the limit is the process's.
TEST_F(KernelCacheTest, AFullDiskLeavesMemoryAndNoDebris) {
  EXPECT_TRUE(holds_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{64, 64};
    ::setrlimit(RLIMIT_FSIZE, &small);
    KernelCache cache({folder_.path(), kLimit});
    const bool right = cache.get(key_of("k"), [] { return kernel_of("x"); })->cubin == "x";
    return right && cache.note().find("could not be written") != std::string::npos;
  }));
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_EQ(entry.path().filename().string().rfind("lock-", 0), 0u) << entry.path();
  }
}

TEST_F(KernelCacheTest, SixteenThreadsBuildOnce) {
  KernelCache cache({folder_.path(), kLimit});
  std::atomic<int> builds{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      const auto kernel = cache.get(key_of("k"), [&] {
        ++builds;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return kernel_of("x");
      });
      EXPECT_EQ(kernel->cubin, "x");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(builds, 1);
}

// Sixteen processes start at once; each build adds a byte to a file.
TEST_F(KernelCacheTest, SixteenProcessesBuildOnce) {
  const std::string tally = folder_.path() + "/tally";
  std::vector<pid_t> children;
  for (int i = 0; i < 16; ++i) {
    const pid_t child = ::fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    KernelCache cache({folder_.path(), kLimit});
    const auto kernel = cache.get(key_of("k"), [&] {
      const int file = ::open(tally.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      const bool counted = ::write(file, "x", 1) == 1;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return kernel_of(counted ? "code" : "");
    });
    ::_exit(kernel->cubin == "code" && cache.note().empty() ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(fs::file_size(tally), 1u);
  EXPECT_EQ(entries().size(), 1u);
}

TEST_F(KernelCacheTest, AProcessKilledWhileCompilingHoldsNothing) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    KernelCache cache({folder_.path(), kLimit});
    cache.get(key_of("k"), [&]() -> CompiledKernel {
      if (::write(ready[1], "x", 1) != 1) ::_exit(1);
      while (true) ::pause();
    });
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  const auto start = std::chrono::steady_clock::now();
  bool built = false;
  EXPECT_EQ(get("k", &built), "code of k");
  EXPECT_TRUE(built);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(KernelCacheTest, TheOldestLeaveWhenTheLimitIsPassed) {
  KernelCache cache({folder_.path(), 10000});
  const auto add = [&](const std::string& name) {
    cache.get(key_of(name), [] { return kernel_of(std::string(2000, 'x')); });
  };
  add("a");
  add("b");
  const auto now = fs::file_time_type::clock::now();
  for (const fs::path& entry : entries()) fs::last_write_time(entry, now - std::chrono::hours(1));
  get("a");  // used: younger than b now
  add("c");
  EXPECT_LE(cache.folder().bytes(), 10000u);
  std::string names;
  for (const fs::path& entry : entries()) names += entry.filename().string()[0];
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, "ac");
}

TEST_F(KernelCacheTest, ALimitOfZeroKeepsNothingOnDisk) {
  KernelCache cache({folder_.path(), 0});
  cache.get(key_of("k"), [] { return kernel_of("x"); });
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(KernelCacheTest, ClearRemovesEntriesAndKeepsKernelsInUse) {
  KernelCache cache({folder_.path(), kLimit});
  const auto kernel = cache.get(key_of("k"), [] { return kernel_of("x"); });
  EXPECT_GT(cache.folder().bytes(), 0u);
  cache.clear();
  EXPECT_EQ(cache.folder().bytes(), 0u);
  EXPECT_EQ(kernel->cubin, "x");
  EXPECT_EQ(cache.get(key_of("k"), [] { return kernel_of("y"); })->cubin, "y");
}

TEST(CacheSettings, ComeFromTheEnvironment) {
  const ScopedVariable home("HOME", "/home/someone");
  const ScopedVariable no_xdg("XDG_CACHE_HOME", std::nullopt);
  const ScopedVariable no_folder("FULMEN_CACHE_DIR", std::nullopt);
  EXPECT_EQ(cache_settings().folder, "/home/someone/.cache/fulmen");
  EXPECT_EQ(cache_settings().limit_bytes, kDefaultCacheLimitBytes);
  const ScopedVariable xdg("XDG_CACHE_HOME", "/xdg");
  EXPECT_EQ(cache_settings().folder, "/xdg/fulmen");
  const ScopedVariable folder("FULMEN_CACHE_DIR", "/own");
  EXPECT_EQ(cache_settings().folder, "/own");
}

TEST(CacheSettings, LimitsHaveUnits) {
  const auto limit = [](const char* text) {
    const ScopedVariable variable("FULMEN_CACHE_LIMIT", text);
    return cache_settings().limit_bytes;
  };
  EXPECT_EQ(limit("123"), 123u);
  EXPECT_EQ(limit("2K"), 2048u);
  EXPECT_EQ(limit("256M"), 256u << 20);
  EXPECT_EQ(limit("3G"), std::uint64_t{3} << 30);
  EXPECT_EQ(limit("0"), 0u);
  for (const char* wrong :
       {"x", "-1", "1T", "1MB", "M", "99999999999999999999", "18446744073709551615G"}) {
    expect_error(Status::kArgument, {"FULMEN_CACHE_LIMIT", wrong, "256M"}, [&] { limit(wrong); });
  }
}

}  // namespace
}  // namespace fulmen::gpu
