// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Bundles: written as a whole, read with every length checked.

#include "gpu/jit/bundle.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "core/error.h"
#include "gpu/jit/cache_file.h"
#include "gpu/jit/sha256.h"

namespace fulmen::gpu {
namespace {

constexpr std::string_view kMagic = "fulmen bundle 2\n";
constexpr std::uint64_t kMaxBytes = std::uint64_t{4} << 30;
constexpr std::size_t kKeyBytes = 64;
constexpr std::size_t kDigestBytes = 32;

std::string bytes_of_number(std::uint64_t number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// No compiler's version is part of it.
std::string key_of(const KernelSpec& spec, const std::string& arch) {
  return kernel_key(spec, arch, 0).digest;
}

struct Bundles {
  std::mutex mutex;
  bool looked_at_environment = false;
  std::string path;
  std::map<std::string, KernelCache::Kernel> kernels;
};

Bundles& bundles() {
  static Bundles the_bundles;
  return the_bundles;
}

// Takes pieces from the front of a file's text; empty handed where it is too short.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  std::optional<std::string_view> take(std::size_t count) {
    if (count > rest_.size()) return std::nullopt;
    const std::string_view piece = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return piece;
  }
  std::optional<std::uint64_t> number() {
    const auto piece = take(sizeof(std::uint64_t));
    if (!piece) return std::nullopt;
    std::uint64_t value = 0;
    std::memcpy(&value, piece->data(), sizeof(value));
    return value;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw Error(Status::kArgument, sentence("the bundle ", path, " ", reason,
                                          "; make it again (fulmen compile, fulmen_bundle_write)"));
}

std::map<std::string, KernelCache::Kernel> read_bundle(const std::string& path) {
  const FileContent file = read_file(path, Trust::kNamed, kMaxBytes);
  if (!file.bytes) {
    refuse(path,
           sentence("cannot be read (", file.problem.empty() ? "no such file" : file.problem, ")"));
  }
  Reader reader(*file.bytes);
  if (reader.take(kMagic.size()) != kMagic) refuse(path, "is no bundle of kernels");
  const auto digest = reader.take(kDigestBytes);
  if (!digest || bytes_of(sha256(reader.rest())) != *digest) refuse(path, "is damaged");
  if (reader.take(kDigestBytes) != bytes_of(digest_of_sources())) {
    refuse(path, "was made by another version of fulmen");
  }
  std::map<std::string, KernelCache::Kernel> kernels;
  const std::uint64_t count = reader.number().value_or(0);
  for (std::uint64_t index = 0; index < count; ++index) {
    const auto key = reader.take(kKeyBytes);
    const auto size = reader.number();
    const auto entry = size ? reader.take(*size) : std::nullopt;
    std::optional<CompiledKernel> kernel = entry ? decode(*entry, *key) : std::nullopt;
    if (!kernel) refuse(path, "is damaged");
    kernel->origin = Origin::kBundle;
    kernels[std::string(*key)] = std::make_shared<const CompiledKernel>(std::move(*kernel));
  }
  return kernels;
}

void add(Bundles& all, const std::string& path) {
  for (auto& [key, kernel] : read_bundle(path)) all.kernels[key] = kernel;
  all.path = path;
}

// With the mutex held.
void look_at_environment(Bundles& all) {
  if (all.looked_at_environment) return;
  const char* named = std::getenv("FULMEN_BUNDLE");
  if (named != nullptr && *named != '\0') add(all, named);
  all.looked_at_environment = true;
}

}  // namespace

Sha256::Digest digest_of_sources() {
  Sha256 hash;
  for (const SourceFile& file : kernel_sources()) {
    hash.add_field(file.name);
    hash.add_field(file.text);
  }
  return hash.finish();
}

void write_bundle(const std::vector<BundleEntry>& entries, const std::string& path) {
  std::map<std::string, std::string> kernels;
  for (const BundleEntry& entry : entries) {
    const std::string key = key_of(entry.spec, entry.arch);
    kernels[key] = encode(key, *entry.kernel);
  }
  std::string payload = bytes_of(digest_of_sources()) + bytes_of_number(kernels.size());
  for (const auto& [key, bytes] : kernels) {
    payload += key + bytes_of_number(bytes.size()) + bytes;
  }
  const std::string problem =
      write_file_atomically(path, std::string(kMagic) + bytes_of(sha256(payload)) + payload);
  if (problem.empty()) return;
  throw Error(Status::kArgument,
              sentence("the bundle ", path, " could not be written (", problem, ")"));
}

void load_bundle(const std::string& path) {
  const std::lock_guard lock(bundles().mutex);
  look_at_environment(bundles());
  add(bundles(), path);
}

KernelCache::Kernel bundled_kernel(const KernelSpec& spec, const std::string& arch) {
  const std::lock_guard lock(bundles().mutex);
  look_at_environment(bundles());
  if (bundles().kernels.empty()) return nullptr;
  const auto found = bundles().kernels.find(key_of(spec, arch));
  return found == bundles().kernels.end() ? nullptr : found->second;
}

BundleInfo bundle_info() {
  const std::lock_guard lock(bundles().mutex);
  return {bundles().path, bundles().kernels.size()};
}

}  // namespace fulmen::gpu
