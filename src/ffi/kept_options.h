// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Options of calls, read once and kept under a number for the life of the process: a graph of
// PyTorch's may outlive whoever made it. Any thread may add and read.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "ffi/refusal.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

struct Kept {
  fulmen_problem options;
  bool rows_before_heads;
  int64_t rank;  // of q, k and v
};

class KeptOptions {
 public:
  // Their number; 0 where there is no more room.
  int64_t add(const Kept& kept) {
    const std::lock_guard lock(adding_);
    const size_t index = size_.load(std::memory_order_relaxed);
    if (index == all_.size()) return 0;
    all_[index] = kept;
    size_.store(index + 1, std::memory_order_release);
    return kFirst + static_cast<int64_t>(index);
  }

  const Kept& at(double number) const {
    const double index = number - static_cast<double>(kFirst);
    if (index >= 0 && index < static_cast<double>(size_.load(std::memory_order_acquire))) {
      return all_[static_cast<size_t>(index)];
    }
    throw Refusal{FULMEN_ERROR_ARGUMENT,
                  "this operator runs for fulmen.attention alone; call that one"};
  }

 private:
  static constexpr int64_t kFirst = 2;  // above every probability: the number travels as dropout_p

  std::mutex adding_;
  std::array<Kept, 1024> all_;
  std::atomic<size_t> size_ = 0;
};

}  // namespace fulmen::ffi
