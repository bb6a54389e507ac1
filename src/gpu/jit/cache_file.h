// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Files of the kernel cache: one compiled kernel as bytes, with its key and a checksum; files that
// are either whole or absent; locks. A file that was cut short, changed, written by another version
// or made for another key decodes to nothing. An entry is machine code: whoever can write one
// decides what a process runs, so nothing is read that others than its user and root may write.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gpu/jit/compiler.h"

namespace fulmen::gpu {

// "fulmen kernel 2\n" | SHA-256 of the rest | key (64 characters) | bytes of log, of cubin (u64
// each) | log | cubin
std::string encode(std::string_view key, const CompiledKernel& kernel);
std::optional<CompiledKernel> decode(std::string_view bytes, std::string_view key);

// Makes the folder and those above it that are missing, for the user of this process alone. Returns
// "", or why it may not hold kernels: it cannot be made, is no folder, belongs to somebody else, or
// others may write to it.
std::string make_own_folder(const std::string& path);

// Whom a file may come from: a caller who named it, or this process's user and root alone, who then
// must be the only ones who may write it.
enum class Trust { kNamed, kOwn };

struct FileContent {
  std::optional<std::string> bytes;
  std::string problem;  // why there are none, one clause; "" where there is no such file
};

// A regular file of at most limit_bytes. Never waits: a pipe is no regular file. kOwn: links are
// not followed, and the file is marked as used now.
FileContent read_file(const std::string& path, Trust trust, std::uint64_t limit_bytes);

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
