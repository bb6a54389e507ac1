// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The half of the kernel cache that is on disk, which any number of processes use at once.
//
// Files of the folder: <label>-<digest>.kernel, the entries; lock-00 .. lock-ff, one of which is
// held while a kernel is compiled and which are never removed (removing a lock file would let two
// processes hold "the same" lock); *.tmp, what killed processes leave, removed with the evictions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/jit/cache_settings.h"
#include "gpu/jit/compiler.h"
#include "gpu/jit/file_lock.h"

namespace fulmen::gpu {

// What an entry is called.
struct KernelKey {
  std::string label;   // for people: "forward_naive_float32-sm_90a"
  std::string digest;  // hex SHA-256
};

class CacheFolder {
 public:
  // Makes the folder where need be. Where that fails or settings leave it out, is_open is false and
  // problem() says why in one sentence.
  explicit CacheFolder(CacheSettings settings);

  const CacheSettings& settings() const { return settings_; }
  bool is_open() const { return is_open_; }
  const std::string& problem() const { return problem_; }

  // Null where there is no such entry, or a damaged one.
  std::shared_ptr<const CompiledKernel> read(const KernelKey& key) const;

  // Writes an entry, and evicts others beyond the limit. Returns what is wrong, "" for nothing.
  std::string store(const KernelKey& key, const CompiledKernel& kernel) const;

  // Held by one process while it compiles a kernel; two kernels may share one.
  std::string lock_path(const KernelKey& key) const;

  // Removes every entry.
  void clear() const;

  std::uint64_t bytes() const;
  std::size_t num_entries() const;

 private:
  std::string entry_path(const KernelKey& key) const;
  void evict() const;

  CacheSettings settings_;
  bool is_open_ = false;
  std::string problem_;
};

}  // namespace fulmen::gpu
