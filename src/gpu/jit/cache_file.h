// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Files of the kernel cache: one compiled kernel as bytes, with a checksum; files that are either
// whole or absent; locks. A file that was cut short, changed or written by another version decodes
// to nothing.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "gpu/jit/compiler.h"

namespace fulmen::gpu {

// "fulmen kernel 1\n" | SHA-256 of the rest | bytes of log, of cubin (u64 each) | log | cubin
std::string encode(const CompiledKernel& kernel);
std::optional<CompiledKernel> decode(std::string_view bytes);

// The whole file, or nothing. `touch` marks it as used now.
std::optional<std::string> read_file(const std::string& path, bool touch);

// Writes a temporary file beside `path` and renames it, so that readers see all or nothing. Returns
// "" or what went wrong; then nothing is left behind.
std::string write_file_atomically(const std::string& path, std::string_view bytes);

// A lock between processes and between threads, held through an open file: the system releases it
// when the holder closes the file or dies, so that a dead process cannot hold it.
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
