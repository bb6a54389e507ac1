// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where kernels are kept on disk, and how much of it they may take: environment variables.
#pragma once

#include <cstdint>
#include <string>

namespace fulmen::gpu {

struct CacheSettings {
  std::string folder;             // "": memory only
  std::uint64_t limit_bytes = 0;  // of all entries together; 0: nothing is kept on disk
};

inline constexpr std::uint64_t kDefaultCacheLimitBytes = std::uint64_t{256} << 20;

// FULMEN_CACHE_DIR, else $XDG_CACHE_HOME/fulmen, else ~/.cache/fulmen; FULMEN_CACHE_LIMIT in bytes
// or with K, M, G behind it. Throws Error kArgument for a limit that is no size.
CacheSettings cache_settings();

}  // namespace fulmen::gpu
