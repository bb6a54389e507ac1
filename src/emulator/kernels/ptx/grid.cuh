// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What blocks do with each other, on the host: what src/kernels/ptx/grid.cuh declares. One thread
// runs at a time, so plain memory is ordered.
#pragma once

#include <cstring>
#include <string>

#include "emulator/block.h"

namespace fulmen::ptx {

struct F32x4 {
  float word[4];
};

inline void check_vector(const void* pointer, const char* instruction) {
  if (reinterpret_cast<u64>(pointer) % 16 != 0) {
    emulator::fail(std::string(instruction) + " to an address that is not a multiple of 16");
  }
}

inline void reduce_add_x4(float* pointer, float a, float b, float c, float d) {
  check_vector(pointer, "red.global.add.v4");
  pointer[0] += a;
  pointer[1] += b;
  pointer[2] += c;
  pointer[3] += d;
}

inline void reduce_add(float* pointer, float x) { *pointer += x; }

inline F32x4 load_l2_x4(const float* pointer) {
  check_vector(pointer, "ld.global.v4");
  return {{pointer[0], pointer[1], pointer[2], pointer[3]}};
}
inline void store_l2_x4(float* pointer, F32x4 x) {
  check_vector(pointer, "st.global.v4");
  std::memcpy(pointer, &x, sizeof(x));
}

inline u32 atomic_add(u32* pointer, u32 x) {
  const u32 old = *pointer;
  *pointer += x;
  return old;
}

inline void announce(u32* counter) { ++*counter; }

class CounterWait final : public emulator::Wait {
 public:
  CounterWait(const u32* counter, u32 count) : counter_(counter), count_(count) {}
  bool over() const override { return *counter_ >= count_; }
  std::string reason() const override {
    return "ld.acquire: a counter stands at " + std::to_string(*counter_) + " of " +
           std::to_string(count_);
  }

 private:
  const u32* counter_;
  u32 count_;
};
inline void await(const u32* counter, u32 count) { emulator::wait(CounterWait(counter, count)); }

inline void grid_dependency_wait() {}
inline void grid_dependents_launch() {}

}  // namespace fulmen::ptx
