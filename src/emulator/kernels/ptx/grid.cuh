// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What blocks do with each other, on the host: what src/kernels/ptx/grid.cuh declares. One thread
// runs at a time, so plain memory is ordered.
#pragma once

#include <cstring>
#include <string>

#include "emulator/accesses.h"
#include "emulator/cluster.h"
#include "emulator/order.h"
#include "kernels/ptx/memory.cuh"

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
  for (u32 i = 0; i < 4; ++i) {
    emulator::store_unseen(pointer + i, emulator::load_unseen(pointer + i) + addends[i]);
  }
}

inline void reduce_add(float* pointer, float x, Site site = Where::current()) {
  emulator::on_global(pointer, 4, emulator::Kind::kAtomic, site);
  emulator::store_unseen(pointer, emulator::load_unseen(pointer) + x);
}

inline void prefetch_l2(const float*) {}  // changes nothing that a kernel sees
inline F32x4 load_l2_x4(const float* pointer, Site site = Where::current()) {
  check_vector(pointer, "ld.global.v4");
  emulator::on_global(pointer, 16, emulator::Kind::kRead, site);
  return emulator::load_unseen(reinterpret_cast<const F32x4*>(pointer));
}
inline F32x2 load_l2_x2(const float* pointer, Site site = Where::current()) {
  emulator::on_global(pointer, 8, emulator::Kind::kRead, site);
  return emulator::load_unseen(reinterpret_cast<const F32x2*>(pointer));
}
inline float load_l2(const float* pointer, Site site = Where::current()) {
  emulator::on_global(pointer, 4, emulator::Kind::kRead, site);
  return emulator::load_unseen(pointer);
}
inline void store_l2_x2(float* pointer, F32x2 x, Site site = Where::current()) {
  emulator::on_global(pointer, 8, emulator::Kind::kWrite, site);
  emulator::store_unseen(reinterpret_cast<F32x2*>(pointer), x);
}
inline void store_l2_x4(float* pointer, F32x4 x, Site site = Where::current()) {
  check_vector(pointer, "st.global.v4");
  emulator::on_global(pointer, 16, emulator::Kind::kWrite, site);
  emulator::store_unseen(reinterpret_cast<F32x4*>(pointer), x);
}

inline u32 atomic_add(u32* pointer, u32 x, Site site = Where::current()) {
  emulator::on_global(pointer, 4, emulator::Kind::kAtomic, site);
  const u32 old = emulator::load_unseen(pointer);
  emulator::store_unseen(pointer, old + x);
  return old;
}

inline void announce(u32* counter, Site site = Where::current()) {
  emulator::on_global(counter, 4, emulator::Kind::kAtomic, site);
  emulator::announce_on(counter);
  emulator::store_unseen(counter, emulator::load_unseen(counter) + 1);
}

inline void start_counter(u64* counter, u64 stamp, Site site = Where::current()) {
  emulator::on_global(counter, 8, emulator::Kind::kAtomic, site);
  if ((emulator::load_unseen(counter) ^ stamp) >> 16 != 0) emulator::store_unseen(counter, stamp);
}

inline u32 arrive(u64* counter, u32 count, Site site = Where::current()) {
  emulator::on_global(counter, 8, emulator::Kind::kAtomic, site);
  emulator::announce_on(counter);
  emulator::hear_of(counter);
  const u64 before = emulator::load_unseen(counter);
  emulator::store_unseen(counter, before + count);
  return static_cast<u32>(before & 0xffff);
}

class CounterWait final : public emulator::Wait {
 public:
  CounterWait(const u32* counter, u32 count) : counter_(counter), count_(count) {}
  bool over() const override { return emulator::load_unseen(counter_) >= count_; }
  std::string reason() const override {
    return "ld.acquire: a counter stands at " + std::to_string(emulator::load_unseen(counter_)) +
           " of " + std::to_string(count_);
  }

 private:
  const u32* counter_;
  u32 count_;
};
inline void await(const u32* counter, u32 count, Site site = Where::current()) {
  emulator::on_global(counter, 4, emulator::Kind::kAtomic, site);
  emulator::wait(CounterWait(counter, count));
  emulator::hear_of(counter);
}

inline void grid_dependency_wait() { emulator::await_launches(); }
inline void grid_dependents_launch() { emulator::release_launch(); }

template <class Real>
void add_to(Real* sum, Real x, Site site = Where::current()) {
  if (reinterpret_cast<u64>(sum) % sizeof(Real) != 0) {
    emulator::fail("red.global.add to an address that is not a multiple of the number's size");
  }
  emulator::on_global(sum, sizeof(Real), emulator::Kind::kAtomic, site);
  emulator::store_unseen(sum, emulator::load_unseen(sum) + x);
}

template <class Real, i32 kCount>
void add_vector_to(Real* sums, const Real (&x)[kCount], Site site = Where::current()) {
  if (reinterpret_cast<u64>(sums) % 16 != 0) {
    emulator::fail("red.global.add of a vector to an address that is not a multiple of 16");
  }
  for (i32 i = 0; i < kCount; ++i) add_to(sums + i, x[i], site);
}

inline void set_bits(u32* word, u32 bits, Site site = Where::current()) {
  emulator::on_global(word, 4, emulator::Kind::kAtomic, site);
  emulator::store_unseen(word, emulator::load_unseen(word) | bits);
}

inline void raise_to(float* number, float x, Site site = Where::current()) {
  emulator::on_global(number, 4, emulator::Kind::kAtomic, site);
  const float before = emulator::load_unseen(number);
  emulator::store_unseen(number, before > x ? before : x);
}

inline void set_flag(u8* flag, Site site = Where::current()) {
  emulator::on_global(flag, 1, emulator::Kind::kAtomic, site);
  emulator::store_unseen(flag, u8{1});
}

inline u32 cluster_rank() { return emulator::block().rank; }
inline u32 cluster_size() { return static_cast<u32>(emulator::block().cluster->blocks.size()); }
inline u32 map_shared(u32 address, u32 rank) { return emulator::map_shared(address, rank); }

inline void cluster_arrive() { emulator::cluster_arrive(true); }
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(false); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

inline u32 load_cluster(u32 address, Site site = Where::current()) {
  return emulator::load_cluster<u32>(address, site);
}
inline U32x4 load_cluster_x4(u32 address, Site site = Where::current()) {
  return emulator::load_cluster<U32x4>(address, site);
}
inline void store_cluster(u32 address, u32 x, Site site = Where::current()) {
  emulator::store_cluster(address, x, site);
}
inline void store_cluster_x4(u32 address, U32x4 x, Site site = Where::current()) {
  emulator::store_cluster(address, x, site);
}

}  // namespace fulmen::ptx
