// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Requests like an earlier one: a plan is checked once, and each later request is held against it.
//
// A key is what the plan of a request depends on: options, extents, strides, dtypes, the device or
// the number of threads, and what pointers are multiples of; not the pointers, and not dropout's
// seed. Requests of one key are valid together, but for null pointers and arrays that overlap
// (bind). device_name and experiments are left out: plans with either are not kept.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/problem.h"

namespace fulmen {

struct RequestKey {
  // num_threads: of a plan for the CPU.
  explicit RequestKey(const Request& request, i64 num_threads = 0);

  std::span<const u64> words() const { return {word.data(), size}; }

  static constexpr std::size_t kMaxWords = 32 + 9 * kNumArrays;
  std::array<u64, kMaxWords> word;
  std::size_t size = 0;
  u64 hash = 0;
};

// The same problem with other pointers: `arrays` must agree with the problem in everything else.
// Throws Error naming the array and what differs. pointer_alignment becomes that of `arrays`.
Problem rebind(const Problem& problem, const Arrays& arrays);

// Likewise where `arrays` are known to differ from those that the problem was made of by pointers
// alone (same_layout, or equal keys): only what pointers decide is checked.
Problem bind(const Problem& problem, const Arrays& arrays);

// Likewise, and with the seed and offset of the request.
Problem bind(const Problem& problem, const Request& request);

// Whether two sets of arrays, as callers gave them, differ by pointers alone.
bool same_layout(const Arrays& a, const Arrays& b);

// Plans of simple calls, so that a call like an earlier one finds its plan and only runs. Both
// backends have one; Plan is what their runs need. Thread safe.
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
