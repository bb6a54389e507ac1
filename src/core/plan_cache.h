// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of simple calls, so that a call like an earlier one finds its plan and only runs. Both
// backends have one; Plan is what their runs need. Thread safe.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "core/request_key.h"

namespace fulmen {

template <class Plan>
class PlanCache {
 public:
  using Pointer = std::shared_ptr<const Plan>;

  // Null when there is none.
  Pointer find(const RequestKey& key) const {
    const std::shared_lock lock(mutex_);
    const auto [first, last] = entries_.equal_range(key.hash);
    for (auto at = first; at != last; ++at) {
      if (std::ranges::equal(at->second.words, key.words())) return at->second.plan;
    }
    return nullptr;
  }

  // Forgets all before it holds more than a thousand.
  void insert(const RequestKey& key, const Pointer& plan) {
    const auto words = key.words();
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= kMaxPlans) entries_.clear();
    entries_.emplace(key.hash, Entry{{words.begin(), words.end()}, plan});
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
  }

 private:
  static constexpr std::size_t kMaxPlans = 1000;

  struct Entry {
    std::vector<u64> words;
    Pointer plan;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_multimap<u64, Entry> entries_;
};

}  // namespace fulmen
