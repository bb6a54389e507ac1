// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of simple calls, so that a call like an earlier one finds its plan and only launches. The
// key holds all that a plan depends on: options, extents, strides, dtypes, the device, and what
// pointers are multiples of; not the pointers, and not dropout's seed. Thread safe.
#pragma once

#include <array>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "cuda/prepared_plan.h"

namespace fulmen::cuda {

struct PlanKey {
  explicit PlanKey(const Request& request);

  std::span<const u64> words() const { return {word.data(), size}; }

  static constexpr std::size_t kMaxWords = 32 + 9 * kNumArrays;
  std::array<u64, kMaxWords> word;
  std::size_t size = 0;
  u64 hash = 0;
};

class PlanCache {
 public:
  using Plan = std::shared_ptr<const PreparedPlan>;

  // Null when there is none.
  Plan find(const PlanKey& key) const;

  // Forgets all before it holds more than a thousand.
  void insert(const PlanKey& key, const Plan& plan);

  void clear();

 private:
  static constexpr std::size_t kMaxPlans = 1000;

  struct Entry {
    std::vector<u64> words;
    Plan plan;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_multimap<u64, Entry> entries_;
};

}  // namespace fulmen::cuda
