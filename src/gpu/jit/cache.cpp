// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a key to a kernel: memory, disk, compiler, in that order. Entries are files: found by
// suffix, written under another name and renamed, removed by age.

#include "gpu/jit/cache.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/error.h"
#include "gpu/jit/cache_file.h"
#include "gpu/jit/sha256.h"

namespace fulmen::gpu {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// "256M" in bytes.
std::uint64_t size_from(const std::string& text) {
  std::uint64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string unit(end, last);
  const std::string letters = "KMG";
  const std::size_t power = unit.empty() ? 0 : letters.find(unit[0]) + 1;
  const bool unit_ok = unit.empty() || (unit.size() == 1 && power != 0);
  if (error != std::errc() || !unit_ok || value > (~std::uint64_t{0} >> (10 * power))) {
    throw Error(Status::kArgument,
                sentence("FULMEN_CACHE_LIMIT is '", text,
                         "'; write a number of bytes, such as 268435456 or 256M"));
  }
  return value << (10 * power);
}

}  // namespace

CacheSettings cache_settings() {
  CacheSettings settings;
  settings.folder = environment("FULMEN_CACHE_DIR");
  if (settings.folder.empty() && !environment("XDG_CACHE_HOME").empty()) {
    settings.folder = environment("XDG_CACHE_HOME") + "/fulmen";
  }
  if (settings.folder.empty() && !environment("HOME").empty()) {
    settings.folder = environment("HOME") + "/.cache/fulmen";
  }
  const std::string limit = environment("FULMEN_CACHE_LIMIT");
  settings.limit_bytes = limit.empty() ? kDefaultCacheLimitBytes : size_from(limit);
  return settings;
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kEntrySuffix = ".kernel";
constexpr const char* kTemporarySuffix = ".tmp";
constexpr std::uint64_t kMaxEntryBytes = std::uint64_t{64} << 20;  // no kernel has nearly as many
constexpr std::chrono::hours kTemporaryAge{1};  // a temporary file this old has lost its writer

struct EntryFile {
  fs::path path;
  std::uint64_t bytes;
  fs::file_time_type used;
};

bool has_suffix(const fs::path& path, const char* suffix) { return path.extension() == suffix; }

// Files that vanish meanwhile are left out: other processes clean up too.
std::vector<EntryFile> files_with(const std::string& folder, const char* suffix) {
  std::vector<EntryFile> files;
  std::error_code stop;
  for (fs::directory_iterator at(folder, stop), end; !stop && at != end; at.increment(stop)) {
    if (!has_suffix(at->path(), suffix)) continue;
    std::error_code gone;
    const std::uint64_t bytes = at->file_size(gone);
    const fs::file_time_type used = gone ? fs::file_time_type{} : at->last_write_time(gone);
    if (!gone) files.push_back({at->path(), bytes, used});
  }
  return files;
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove(path, ignored);
}

// What killed processes left behind; younger ones may still have a writer.
void remove_old_temporaries(const std::string& folder) {
  const auto now = fs::file_time_type::clock::now();
  for (const EntryFile& file : files_with(folder, kTemporarySuffix)) {
    if (now - file.used > kTemporaryAge) remove_quietly(file.path);
  }
}

std::uint64_t total_bytes(const std::vector<EntryFile>& files) {
  std::uint64_t total = 0;
  for (const EntryFile& file : files) total += file.bytes;
  return total;
}

}  // namespace

CacheFolder::CacheFolder(CacheSettings settings) : settings_(std::move(settings)) {
  if (settings_.limit_bytes == 0) {
    problem_ = "kernels are kept in memory only: FULMEN_CACHE_LIMIT is 0";
    return;
  }
  if (settings_.folder.empty()) {
    problem_ = "kernels are kept in memory only: no FULMEN_CACHE_DIR, XDG_CACHE_HOME or HOME";
    return;
  }
  const std::string problem = make_own_folder(settings_.folder);
  is_open_ = problem.empty();
  if (!is_open_) {
    problem_ = sentence("kernels are kept in memory only: the cache folder ", settings_.folder, " ",
                        problem);
  }
}

std::string CacheFolder::entry_path(const KernelKey& key) const {
  return sentence(settings_.folder, "/", key.label, "-", key.digest.substr(0, 32), kEntrySuffix);
}

std::string CacheFolder::lock_path(const KernelKey& key) const {
  return settings_.folder + "/lock-" + key.digest.substr(0, 2);
}

std::shared_ptr<const CompiledKernel> CacheFolder::read(const KernelKey& key,
                                                        std::string& problem) const {
  const std::string path = entry_path(key);
  const FileContent content = read_file(path, Trust::kOwn, kMaxEntryBytes);
  if (!content.bytes) {
    if (!content.problem.empty()) problem = sentence(path, " is not used: ", content.problem);
    return nullptr;
  }
  std::optional<CompiledKernel> kernel = decode(*content.bytes, key.digest);
  if (kernel) kernel->origin = Origin::kDisk;
  return kernel ? std::make_shared<const CompiledKernel>(std::move(*kernel)) : nullptr;
}

std::string CacheFolder::store(const KernelKey& key, const CompiledKernel& kernel) const {
  const std::string path = entry_path(key);
  const std::string problem = write_file_atomically(path, encode(key.digest, kernel));
  if (problem.empty()) {
    evict();
    return "";
  }
  return sentence(path, " could not be written (", problem, ")");
}

// Removes the entries that were not used for longest, down to nine tenths of the limit, so that the
// next entries do not each evict one.
void CacheFolder::evict() const {
  const FileLock lock(settings_.folder + "/lock-evict", std::chrono::milliseconds(0));
  if (!lock) return;  // another process is at it
  remove_old_temporaries(settings_.folder);
  std::vector<EntryFile> entries = files_with(settings_.folder, kEntrySuffix);
  std::uint64_t total = total_bytes(entries);
  if (total <= settings_.limit_bytes) return;
  std::sort(entries.begin(), entries.end(),
            [](const EntryFile& a, const EntryFile& b) { return a.used < b.used; });
  for (const EntryFile& entry : entries) {
    if (total <= settings_.limit_bytes / 10 * 9) break;
    remove_quietly(entry.path);
    total -= entry.bytes;
  }
}

void CacheFolder::clear() const {
  if (!is_open_) return;
  for (const EntryFile& file : files_with(settings_.folder, kEntrySuffix)) {
    remove_quietly(file.path);
  }
  remove_old_temporaries(settings_.folder);
}

std::uint64_t CacheFolder::bytes() const {
  return is_open_ ? total_bytes(files_with(settings_.folder, kEntrySuffix)) : 0;
}

std::size_t CacheFolder::num_entries() const {
  return is_open_ ? files_with(settings_.folder, kEntrySuffix).size() : 0;
}

namespace {

// No kernel takes longer to compile; a process that has waited longer compiles its own.
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

KernelCache::Kernel KernelCache::replace(const KernelKey& key, const Kernel& refused,
                                         const Build& build) {
  const std::shared_ptr<Slot> slot = slot_of(key.digest);
  const std::lock_guard lock(slot->mutex);
  if (slot->kernel == refused) slot->kernel = build_and_store(key, build);
  return slot->kernel;
}

KernelCache::Kernel KernelCache::read(const KernelKey& key) {
  std::string problem;
  Kernel kernel = folder_.read(key, problem);
  if (!problem.empty()) set_note("a kernel is compiled again: " + problem);
  return kernel;
}

KernelCache::Kernel KernelCache::read_or_build(const KernelKey& key, const Build& build) {
  if (!folder_.is_open()) return build_and_store(key, build);
  if (Kernel kernel = read(key)) return kernel;
  const FileLock lock(folder_.lock_path(key), kLockPatience);
  if (lock) {
    if (Kernel kernel = read(key)) return kernel;  // made by the process we waited for
  } else {
    set_note(sentence("kernels may be compiled more than once: the lock ", folder_.lock_path(key),
                      " was not to be had (", lock.reason(), ")"));
  }
  return build_and_store(key, build);
}

KernelCache::Kernel KernelCache::build_and_store(const KernelKey& key, const Build& build) {
  auto kernel = std::make_shared<const CompiledKernel>(build());
  if (!folder_.is_open()) return kernel;
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
