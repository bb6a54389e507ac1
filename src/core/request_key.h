// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the plan of a request depends on: options, extents, strides, dtypes, the device or the
// number of threads, and what pointers are multiples of; not the pointers, and not dropout's seed.
// Requests of one key are valid together, but for null pointers and arrays that overlap (bind.h).
// device_name and experiments are left out: plans with either are not kept.
#pragma once

#include <array>
#include <span>

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

}  // namespace fulmen
