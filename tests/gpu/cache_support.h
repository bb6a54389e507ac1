// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A cache in a folder of its own, for tests of the cache and of its files.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "gpu/jit/cache.h"
#include "support.h"

namespace fulmen::gpu {

namespace fs = std::filesystem;

inline constexpr std::uint64_t kLimit = std::uint64_t{1} << 20;

inline KernelKey key_of(const std::string& name) {
  return kernel_key(small_spec(name), "sm_90a", 13000);
}

inline CompiledKernel kernel_of(const std::string& code) { return {code, "log of " + code}; }

class KernelCacheTest : public testing::Test {
 protected:
  // The code that a fresh cache (as of another process) returns, and whether it had to build it.
  std::string get(const std::string& name, bool* built = nullptr) {
    KernelCache cache({folder_.path(), kLimit});
    if (built != nullptr) *built = false;
    return cache
        .get(key_of(name),
             [&] {
               if (built != nullptr) *built = true;
               return kernel_of("code of " + name);
             })
        ->cubin;
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      if (entry.path().extension() == ".kernel") found.push_back(entry.path());
    }
    return found;
  }
  std::string bytes_of_entry() const {
    return *read_file(entries().at(0), Trust::kOwn, kLimit).bytes;
  }
  // The entry of k is something else: what a fresh cache does with it, the note it leaves, and that
  // a whole entry of this user's is there again.
  void expect_replaced(const std::string& reason) {
    KernelCache cache({folder_.path(), kLimit});
    bool built = false;
    EXPECT_EQ(cache.get(key_of("k"), [&] { return built = true, kernel_of("code of k"); })->cubin,
              "code of k");
    EXPECT_TRUE(built) << reason;
    EXPECT_NE(cache.note().find(reason), std::string::npos) << cache.note();
    EXPECT_EQ(get("k", &built), "code of k");
    EXPECT_FALSE(built) << reason;
    struct stat info{};
    ASSERT_EQ(::lstat(entries().at(0).c_str(), &info), 0);
    EXPECT_TRUE(S_ISREG(info.st_mode));
    EXPECT_EQ(info.st_uid, ::geteuid());
    EXPECT_EQ(info.st_mode & 0777, 0600u);
  }
  TemporaryFolder folder_;
};

inline constexpr uid_t kNobody = 65534;

}  // namespace fulmen::gpu
