// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a key to a kernel: memory, disk, compiler, in that order.

#include "gpu/jit/cache.h"

#include <chrono>

#include "core/error.h"
#include "gpu/jit/sha256.h"

namespace fulmen::gpu {
namespace {

// No kernel takes longer to compile; who waits longer compiles for himself.
constexpr std::chrono::minutes kLockPatience{2};

}  // namespace

KernelKey kernel_key(const KernelSpec& spec, const std::string& arch, int nvrtc_version) {
  Sha256 hash;
  for (const SourceFile& file : reachable_sources(kernel_sources(), spec.include)) {
    hash.add_field(file.name);
    hash.add_field(file.text);
  }
  hash.add_field(wrapper_text(spec));
  for (const std::string& option : compile_options(arch)) hash.add_field(option);
  hash.add_field(std::to_string(nvrtc_version));
  return {spec.name + "-" + arch, hex(hash.finish())};
}

KernelCache::KernelCache(CacheSettings settings)
    : folder_(std::move(settings)), note_(folder_.problem()) {}

KernelCache::Kernel KernelCache::get(const KernelKey& key, const Build& build) {
  const std::shared_ptr<Slot> slot = slot_of(key.digest);
  const std::lock_guard lock(slot->mutex);
  if (slot->kernel == nullptr) slot->kernel = read_or_build(key, build);
  return slot->kernel;
}

std::shared_ptr<KernelCache::Slot> KernelCache::slot_of(const std::string& digest) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Slot>& slot = slots_[digest];
  if (slot == nullptr) slot = std::make_shared<Slot>();
  return slot;
}

KernelCache::Kernel KernelCache::read_or_build(const KernelKey& key, const Build& build) {
  if (!folder_.is_open()) return std::make_shared<const CompiledKernel>(build());
  if (Kernel kernel = folder_.read(key)) return kernel;
  const FileLock lock(folder_.lock_path(key), kLockPatience);
  if (lock) {
    if (Kernel kernel = folder_.read(key)) return kernel;  // made by the process we waited for
  } else {
    set_note(sentence("kernels may be compiled more than once: the lock ", folder_.lock_path(key),
                      " was not to be had (", lock.reason(), ")"));
  }
  auto kernel = std::make_shared<const CompiledKernel>(build());
  const std::string problem = folder_.store(key, *kernel);
  if (!problem.empty()) set_note("kernels are kept in memory only: " + problem);
  return kernel;
}

void KernelCache::clear() {
  {
    const std::lock_guard lock(mutex_);
    slots_.clear();
  }
  folder_.clear();
}

std::string KernelCache::note() const {
  const std::lock_guard lock(mutex_);
  return note_;
}

void KernelCache::set_note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  note_ = text;
}

KernelCache& kernel_cache() {
  static KernelCache cache(cache_settings());
  return cache;
}

}  // namespace fulmen::gpu
