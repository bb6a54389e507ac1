// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Whose files the kernel cache takes, of what kind and size, and the locks.
#include "gpu/jit/cache_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "cache_support.h"

// In the place of the C library's own: fails as a test says.
static int planted_mkdir_error = 0;
extern "C" int mkdir(const char* path, mode_t mode) {
  errno = planted_mkdir_error;
  if (errno != 0) return -1;
  return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

namespace fulmen::gpu {
namespace {

TEST_F(KernelCacheTest, AnEntryUnderTheNameOfAnotherIsBuiltAgain) {
  get("k");
  get("other");
  fs::path of_k, of_other;
  for (const fs::path& entry : entries())
    (entry.filename().string()[0] == 'k' ? of_k : of_other) = entry;
  fs::copy_file(of_other, of_k, fs::copy_options::overwrite_existing);
  bool built = false;
  EXPECT_EQ(get("k", &built), "code of k");
  EXPECT_TRUE(built);
}

TEST_F(KernelCacheTest, AnEntryThatOthersMayWriteIsBuiltAgain) {
  for (const int mode : {0620, 0602, 0666}) {
    get("k");
    fs::permissions(entries().at(0), static_cast<fs::perms>(mode));
    expect_replaced("others may write to it");
  }
}

TEST_F(KernelCacheTest, AnEntryOfAnotherUserIsBuiltAgain) {
  get("k");
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  ASSERT_EQ(::chown(entries().at(0).c_str(), kNobody, kNobody), 0);
  expect_replaced("it belongs to user 65534");
}

TEST_F(KernelCacheTest, ALinkIsNotFollowed) {
  get("k");
  const fs::path entry = entries().at(0);
  const std::string elsewhere = folder_.path() + "/elsewhere";
  fs::rename(entry, elsewhere);
  fs::create_symlink(elsewhere, entry);
  expect_replaced("it is a link");
  EXPECT_TRUE(fs::exists(elsewhere));
}

TEST_F(KernelCacheTest, APipeDoesNotHang) {
  get("k");
  const fs::path entry = entries().at(0);
  fs::remove(entry);
  ASSERT_EQ(::mkfifo(entry.c_str(), 0600), 0);
  ::alarm(20);  // ends the test where a read waits for a writer
  expect_replaced("it is no regular file");
  ::alarm(0);
}

TEST_F(KernelCacheTest, AHugeFileIsNotRead) {
  get("k");
  ASSERT_EQ(::truncate(entries().at(0).c_str(), off_t{1} << 40), 0);
  expect_replaced("it has 1099511627776 bytes");
}

TEST_F(KernelCacheTest, AFolderThatOthersMayWriteLeavesMemory) {
  get("k");
  for (const int mode : {0770, 0707, 01777}) {
    fs::permissions(folder_.path(), static_cast<fs::perms>(mode));
    KernelCache cache({folder_.path(), kLimit});
    EXPECT_EQ(cache.get(key_of("k"), [] { return kernel_of("new"); })->cubin, "new");
    EXPECT_NE(cache.note().find("chmod go-w"), std::string::npos) << cache.note();
  }
  fs::permissions(folder_.path(), static_cast<fs::perms>(0755));
  EXPECT_EQ(get("k"), "code of k");
}

TEST_F(KernelCacheTest, AFolderOfAnotherUserLeavesMemory) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives folders away";
  const std::string theirs = folder_.path() + "/theirs";
  const std::string link = folder_.path() + "/link";
  fs::create_directory(theirs);
  fs::create_symlink(folder_.path(), link);
  EXPECT_TRUE(KernelCache({link, kLimit}).folder().is_open());  // a link of one's own is followed
  ASSERT_EQ(::chown(theirs.c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(::lchown(link.c_str(), kNobody, kNobody), 0);
  for (const std::string& path : {theirs, link}) {
    KernelCache cache({path, kLimit});
    EXPECT_FALSE(cache.folder().is_open());
    EXPECT_NE(cache.note().find("of user 65534") == std::string::npos
                  ? cache.note().find("to user 65534")
                  : 0,
              std::string::npos)
        << cache.note();
  }
}

TEST_F(KernelCacheTest, FoldersAreMadeForTheUserAlone) {
  const mode_t before = ::umask(0);
  const std::string path = folder_.path() + "/a/b";
  const KernelCache cache({path, kLimit});
  ::umask(before);
  EXPECT_EQ(cache.note(), "");
  for (const std::string& made : {folder_.path() + "/a", path}) {
    EXPECT_EQ(fs::status(made).permissions(), fs::perms::owner_all) << made;
  }
}

// What the system said, not what a later look at the missing folder says.
TEST_F(KernelCacheTest, AFolderThatCannotBeMadeIsSaidInTheSystemsWords) {
  for (const int error : {EROFS, EACCES, ENOSPC, EDQUOT}) {
    planted_mkdir_error = error;
    KernelCache cache({folder_.path() + "/new", kLimit});
    planted_mkdir_error = 0;
    EXPECT_NE(cache.note().find(std::strerror(error)), std::string::npos) << cache.note();
  }
}

TEST(FileLock, IsExclusiveBetweenHoldersOfOneProcessToo) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/lock";
  {
    const FileLock first(path, std::chrono::milliseconds(0));
    EXPECT_TRUE(first);
    const FileLock second(path, std::chrono::milliseconds(20));
    EXPECT_FALSE(second);
    EXPECT_NE(second.reason(), "");
  }
  EXPECT_TRUE(FileLock(path, std::chrono::milliseconds(0)));
}

}  // namespace
}  // namespace fulmen::gpu
