// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Entries as files: found by suffix, written under another name and renamed, removed by age.

#include "gpu/jit/cache_folder.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/error.h"
#include "gpu/jit/cache_entry.h"

namespace fulmen::gpu {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEntrySuffix = ".kernel";
constexpr const char* kTemporarySuffix = ".tmp";
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
  std::error_code error;
  if (fs::create_directories(settings_.folder, error)) {
    fs::permissions(settings_.folder, fs::perms::owner_all, error);
  }
  is_open_ = fs::is_directory(settings_.folder, error);
  if (!is_open_) {
    problem_ = sentence("kernels are kept in memory only: the cache folder ", settings_.folder,
                        " cannot be made (", error ? error.message() : "it is no folder", ")");
  }
}

std::string CacheFolder::entry_path(const KernelKey& key) const {
  return sentence(settings_.folder, "/", key.label, "-", key.digest.substr(0, 32), kEntrySuffix);
}

std::string CacheFolder::lock_path(const KernelKey& key) const {
  return settings_.folder + "/lock-" + key.digest.substr(0, 2);
}

std::shared_ptr<const CompiledKernel> CacheFolder::read(const KernelKey& key) const {
  const std::optional<std::string> bytes = read_file(entry_path(key), true);
  if (!bytes) return nullptr;
  std::optional<CompiledKernel> kernel = decode(*bytes);
  if (kernel) kernel->origin = Origin::kDisk;
  return kernel ? std::make_shared<const CompiledKernel>(std::move(*kernel)) : nullptr;
}

std::string CacheFolder::store(const KernelKey& key, const CompiledKernel& kernel) const {
  const std::string path = entry_path(key);
  const std::string problem = write_file_atomically(path, encode(kernel));
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

}  // namespace fulmen::gpu
