// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Each kernel is compiled once per machine: in memory for this process, on disk for all.
//
// An entry's name is a hash of everything that its code depends on (sources, generated text,
// options, architecture, compiler version), so nothing ever goes stale, and old entries are only a
// matter of space. A damaged entry is built again, and so is one that the driver refuses, or that
// somebody else could have written. A folder that cannot be written, or that others may write to,
// leaves the memory half, and note() says so. Any number of threads and processes may use one
// folder at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "gpu/jit/cache_file.h"
#include "gpu/jit/compiler.h"

namespace fulmen::gpu {

// Where kernels are kept on disk, and how much of it they may take.
struct CacheSettings {
  std::string folder;             // "": memory only
  std::uint64_t limit_bytes = 0;  // of all entries together; 0: nothing is kept on disk
};

inline constexpr std::uint64_t kDefaultCacheLimitBytes = std::uint64_t{256} << 20;

// FULMEN_CACHE_DIR, else $XDG_CACHE_HOME/fulmen, else ~/.cache/fulmen; FULMEN_CACHE_LIMIT in bytes
// or with K, M, G behind it. Throws Error kArgument for a limit that is no size.
CacheSettings cache_settings();

// What an entry is called.
struct KernelKey {
  std::string label;   // for people: "forward_naive_float32-sm_90a"
  std::string digest;  // hex SHA-256
};

// The half of the cache that is on disk. Files of the folder: <label>-<digest>.kernel, the entries;
// lock-00 .. lock-ff, one of which is held while a kernel is compiled and which are never removed
// (removing a lock file would let two processes hold "the same" lock); *.tmp, what killed processes
// leave, removed with the evictions.
class CacheFolder {
 public:
  // Makes the folder where need be. Where that fails or settings leave it out, is_open is false and
  // problem() says why in one sentence.
  explicit CacheFolder(CacheSettings settings);

  const CacheSettings& settings() const { return settings_; }
  bool is_open() const { return is_open_; }
  const std::string& problem() const { return problem_; }

  // Null where there is no such entry, or a damaged one, or one that may not be used: `problem`
  // then says why, one sentence.
  std::shared_ptr<const CompiledKernel> read(const KernelKey& key, std::string& problem) const;

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

KernelKey kernel_key(const KernelSpec& spec, const std::string& arch, int nvrtc_version);

class KernelCache {
 public:
  explicit KernelCache(CacheSettings settings);

  using Build = std::function<CompiledKernel()>;
  using Kernel = std::shared_ptr<const CompiledKernel>;

  // The kernel of that key: from memory, from disk, or from build(), whose exceptions pass through
  // (the next call tries again).
  Kernel get(const KernelKey& key, const Build& build);

  // Builds a kernel again, on disk too, in place of one that the driver refuses. What another
  // thread has built meanwhile is taken as it is.
  Kernel replace(const KernelKey& key, const Kernel& refused, const Build& build);

  // Removes every entry, on disk and in memory. Kernels in use stay valid.
  void clear();

  // Why the disk is not used as it should be, one sentence; "" when it is.
  std::string note() const;

  const CacheFolder& folder() const { return folder_; }

 private:
  struct Slot {
    std::mutex mutex;
    Kernel kernel;
  };

  std::shared_ptr<Slot> slot_of(const std::string& digest);
  Kernel read(const KernelKey& key);
  Kernel read_or_build(const KernelKey& key, const Build& build);
  Kernel build_and_store(const KernelKey& key, const Build& build);
  void set_note(const std::string& text);

  CacheFolder folder_;
  mutable std::mutex mutex_;  // of slots_ and note_
  std::map<std::string, std::shared_ptr<Slot>> slots_;
  std::string note_;
};

// The cache of this process, made at first use from cache_settings().
KernelCache& kernel_cache();

}  // namespace fulmen::gpu
