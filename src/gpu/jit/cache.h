// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Each kernel is compiled once per machine: in memory for this process, on disk for all.
//
// An entry's name is a hash of everything that its code depends on (sources, generated text,
// options, architecture, compiler version), so nothing ever goes stale, and old entries are only a
// matter of space. A damaged entry is built again. A folder that cannot be written leaves the
// memory half, and note() says so. Any number of threads and processes may use one folder at once.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "gpu/jit/cache_folder.h"

namespace fulmen::gpu {

KernelKey kernel_key(const KernelSpec& spec, const std::string& arch, int nvrtc_version);

class KernelCache {
 public:
  explicit KernelCache(CacheSettings settings);

  using Build = std::function<CompiledKernel()>;
  using Kernel = std::shared_ptr<const CompiledKernel>;

  // The kernel of that key: from memory, from disk, or from build(), whose exceptions pass through
  // (the next call tries again).
  Kernel get(const KernelKey& key, const Build& build);

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
  Kernel read_or_build(const KernelKey& key, const Build& build);
  void set_note(const std::string& text);

  CacheFolder folder_;
  mutable std::mutex mutex_;  // of slots_ and note_
  std::map<std::string, std::shared_ptr<Slot>> slots_;
  std::string note_;
};

// The cache of this process, made at first use from cache_settings().
KernelCache& kernel_cache();

}  // namespace fulmen::gpu
