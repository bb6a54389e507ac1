// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What blocks do with each other, on the host: what src/kernels/ptx/grid.cuh declares. One thread
// runs at a time, so plain memory is ordered.
#pragma once

#include <cstring>
#include <string>

#include "emulator/accesses.h"
#include "emulator/order.h"
#include "emulator/shared_memory.h"

namespace fulmen::ptx {

struct F32x4 {
  float word[4];
};

inline void check_vector(const void* pointer, const char* instruction) {
  if (reinterpret_cast<u64>(pointer) % 16 != 0) {
    emulator::fail(std::string(instruction) + " to an address that is not a multiple of 16");
  }
}

inline void reduce_add_x4(float* pointer, float a, float b, float c, float d,
                          Site site = Where::current()) {
  check_vector(pointer, "red.global.add.v4");
  emulator::on_global(pointer, 16, emulator::Kind::kAtomic, site);
  const float addends[4] = {a, b, c, d};
  for (u32 i = 0; i < 4; ++i) pointer[i] += addends[i];
}

inline void reduce_add(float* pointer, float x, Site site = Where::current()) {
  emulator::on_global(pointer, 4, emulator::Kind::kAtomic, site);
  *pointer += x;
}

inline F32x4 load_l2_x4(const float* pointer, Site site = Where::current()) {
  check_vector(pointer, "ld.global.v4");
  emulator::on_global(pointer, 16, emulator::Kind::kRead, site);
  return {{pointer[0], pointer[1], pointer[2], pointer[3]}};
}
inline void store_l2_x4(float* pointer, F32x4 x, Site site = Where::current()) {
  check_vector(pointer, "st.global.v4");
  emulator::on_global(pointer, 16, emulator::Kind::kWrite, site);
  emulator::copy_bytes(pointer, &x, sizeof(x));
}

inline u32 atomic_add(u32* pointer, u32 x, Site site = Where::current()) {
  emulator::on_global(pointer, 4, emulator::Kind::kAtomic, site);
  const u32 old = *pointer;
  *pointer += x;
  return old;
}

inline void announce(u32* counter, Site site = Where::current()) {
  emulator::on_global(counter, 4, emulator::Kind::kAtomic, site);
  emulator::hand_over(emulator::world().announced[counter]);
  ++*counter;
}

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
inline void await(const u32* counter, u32 count, Site site = Where::current()) {
  emulator::on_global(counter, 4, emulator::Kind::kAtomic, site);
  emulator::wait(CounterWait(counter, count));
  emulator::take_over(emulator::world().announced[counter]);
}

inline void grid_dependency_wait() {}
inline void grid_dependents_launch() {}

}  // namespace fulmen::ptx
