// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// flock, polled, since it has no waiting with a limit. The lock belongs to the open file and not to
// the process, so it also keeps threads apart.

#include "gpu/jit/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace fulmen::gpu {

FileLock::FileLock(const std::string& path, std::chrono::milliseconds patience)
    : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
  if (descriptor_ < 0) {
    reason_ = std::strerror(errno);
    return;
  }
  constexpr std::chrono::milliseconds kPoll{5};
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    held_ = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
    if (held_) return;
    if (errno != EWOULDBLOCK && errno != EINTR) {
      reason_ = std::strerror(errno);
      return;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      reason_ = "another process held it for too long";
      return;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace fulmen::gpu
