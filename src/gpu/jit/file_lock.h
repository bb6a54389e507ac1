// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A lock between processes and between threads, held through an open file: the kernel lets go of it
// when the holder closes the file or dies, so that a dead process cannot hold it.
#pragma once

#include <chrono>
#include <string>

namespace fulmen::gpu {

class FileLock {
 public:
  // Creates the file where need be and waits for the lock. Not held (false) when the file cannot be
  // opened, the file system has no locks, or the time is over; reason() then says which.
  FileLock(const std::string& path, std::chrono::milliseconds patience);
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock();

  explicit operator bool() const { return held_; }
  const std::string& reason() const { return reason_; }

 private:
  int descriptor_ = -1;
  bool held_ = false;
  std::string reason_;
};

}  // namespace fulmen::gpu
