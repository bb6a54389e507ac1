// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The variables, in their order.

#include "gpu/jit/cache_settings.h"

#include <charconv>
#include <cstdlib>

#include "core/error.h"

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
  const std::string units = "KMG";
  const std::size_t power = unit.empty() ? 0 : units.find(unit[0]) + 1;
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

}  // namespace fulmen::gpu
