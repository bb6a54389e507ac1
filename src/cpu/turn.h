// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Taking turns: several tasks add to one accumulator, each exactly once, in a fixed order, so that
// the sum has the same bits whichever thread comes first. A task may only wait for tasks of lower
// number: those were claimed before it (for_each_task), so the lowest unfinished one never waits,
// and there is progress on any number of threads.
#pragma once

#include <atomic>
#include <thread>

#include "kernels/base.cuh"

namespace fulmen::cpu {

inline void wait_for_turn(i64& counter, i64 turn) {
  constexpr int kSpins = 1000;
  const std::atomic_ref<i64> shared(counter);
  for (int spin = 0; shared.load(std::memory_order_acquire) != turn; ++spin) {
    if (spin > kSpins) std::this_thread::yield();
  }
}

inline void pass_turn(i64& counter, i64 next) {
  std::atomic_ref<i64>(counter).store(next, std::memory_order_release);
}

}  // namespace fulmen::cpu
